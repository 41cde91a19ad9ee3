"""A cache that drops tokens: it keeps the first ones and the latest ones of every layer.

StreamingLLM, Xiao et al. 2023, https://arxiv.org/abs/2309.17453, section 3.2: attention sinks and a window. Here every
token keeps its own position, so that nothing in the cache is rotated again.
"""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..errors import LeanError
from ..model.config import LeanConfig


class EvictingLayer(DynamicLayer):
    """Keeps the first `sinks` and the last `window` tokens after each call; those of a call see all it held before."""

    is_croppable = False

    def __init__(self, sinks: int, window: int):
        super().__init__()
        self.sinks, self.window, self.cumulative_length = sinks, window, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [batch, heads, new positions, columns], of which either may have no heads."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        if keys.shape[-2] > self.sinks + self.window:
            self.keys, self.values = (
                torch.cat((held[:, :, : self.sinks], held[:, :, held.shape[-2] - self.window :]), dim=-2)
                for held in (keys, values)
            )
        return keys, values

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0

    def get_seq_length(self) -> int:
        """Return how many tokens were seen, which the next position is counted from."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key positions and an offset with which all that is held lies before the new tokens."""
        held = min(self.cumulative_length, self.sinks + self.window)
        return held + query_length, self.cumulative_length - held

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a cache that drops tokens cannot go back to an earlier one; decode without an assistant")


class EvictingCache(DynamicCache):
    """Give it to `generate` as `past_key_values`. Borrowed heads drop the same tokens as the layer that lends them.

    Positions go on counting, so a model with learned positions ends at its last one as with any cache.

    Args:
        sinks, window: how many of the first and of the last tokens are kept.

    Raises:
        LeanError: numbers out of range, or a model whose layers have windows, read the positions of cached keys, or
            attend to prefixes.
    """

    drops_tokens = True

    def __init__(self, config: LeanConfig, sinks: int = 4, window: int = 1020):
        if sinks < 0 or window < 1:
            raise LeanError(f"`sinks` is 0 or more and `window` 1 or more, found {sinks} and {window}")
        plan = config.plan
        if windowed := next((layer for layer in plan.layers if layer.window is not None), None):
            raise LeanError(
                f"EvictingCache drops tokens where all are kept, but layer {windowed.layer} keeps a sliding window of "
                f"{windowed.window}; use the default cache"
            )
        if config.mask_type == "prefix":
            raise LeanError(
                "EvictingCache drops tokens of the prefix, which mask_type 'prefix' shows to all; use the default cache"
            )
        if plan.turns_keys_in is not None and config.position_embedding_type == "rope":
            raise LeanError(
                f"EvictingCache leaves gaps between positions, but layer {plan.turns_keys_in} turns cached keys by "
                "their positions, which no cache keeps; use the default cache"
            )
        super().__init__()
        self.layers = [EvictingLayer(sinks, window) for _ in plan.layers]
