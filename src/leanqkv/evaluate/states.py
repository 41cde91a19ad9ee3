"""Last hidden states of a text, as the cache that decoding reads makes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache_bits import CacheBits
from ..model.cache_quantized import BLOCK
from ..model.transformer import LeanHeadModel

# From a model and token ids [batch, length] to its last hidden states [batch, length, hidden_size]; of a model with
# prefixes that windows have, with a `prefix_mask`.
States = Callable[..., Tensor]


def last_states(model: Any, input_ids: Tensor, **given: Tensor) -> Tensor:
    """Return a model's last hidden states [batch, length, hidden_size], without a cache."""
    return model.model.forward(input_ids=input_ids, use_cache=False, **given).last_hidden_state


def own_states(model: Any) -> States | None:
    """Return what makes the last hidden states of a model of this library; None of another one."""
    return last_states if isinstance(model, LeanHeadModel) else None


def cached_states(bits: CacheBits) -> States:
    """Return what makes the states with each token reading a cache of this precision, as decoding does.

    A block of tokens at a time: it is quantized when it is complete, so those in it read each other whole.
    """

    def states(model: Any, input_ids: Tensor) -> Tensor:
        cache = bits.cache(model.config)
        parts = [
            model.model.forward(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
            for part in input_ids.split(BLOCK, dim=1)
        ]
        return torch.cat(parts, dim=1)

    return states if bits.quantized else last_states


def obstacle(bits: CacheBits, config: Any, length: int) -> str | None:
    """Return why sequences of `length` tokens cannot be read through such a cache, or would read none of it; or None.

    See `cached_states`.
    """
    if not bits.quantized:
        return None
    reason = None
    if config.mask_type == "prefix":
        reason = "a model with prefixes reads them whole, in both directions"
    elif length < 2 * BLOCK:
        reason = f"a sequence has {length} tokens; give sequences of {2 * BLOCK} or more"
    elif config.cached_positions is not None and length > config.cached_positions:
        reason = f"rotary frequencies change behind {config.cached_positions} positions; give shorter sequences"
    return reason and f"a quantized cache is read by blocks of {BLOCK} tokens, but {reason}"
