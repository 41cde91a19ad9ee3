"""Which positions each query may see, in the form that the attention implementation in use wants."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from .plan import Plan


def make_masks(
    config,
    plan: Plan,
    inputs_embeds: Tensor,
    attention_mask: Tensor | dict[int | None, Any] | None,
    prefix_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
) -> dict[int | None, Any]:
    """A mask for every window that some layer of the plan attends within (None: no window).

    attention_mask, prefix_mask: [batch, past + positions], 1 for tokens that are there or belong to the prefix; or, in
    place of both, the masks themselves: [batch, 1, positions, key positions] for all windows, or one for each.
    position_ids: None unless the caller gave some: only those can be of packed sequences, and where values cannot be
    read, as in a compiled graph, transformers would make a mask of any.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    given: dict[str, Any] = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "past_key_values": past_key_values,
    }
    if config.bidirectional:
        return {None: create_bidirectional_mask(**given)}
    given["position_ids"] = position_ids
    if prefix_mask is not None:
        given["or_mask_function"] = _in_prefix(prefix_mask, inputs_embeds, attention_mask, past_key_values)
    makers = {True: create_sliding_window_causal_mask, False: create_causal_mask}
    return {window: makers[window is not None](**given) for window in {layer.window for layer in plan.layers}}


def static_masks(
    config, plan: Plan, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache, position_ids: Any
) -> Any:
    """An `attention_mask` for a static cache that is as long at every step, so that one compiled step serves all."""
    if config.mask_type == "prefix":
        length, _ = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return None if attention_mask is None else F.pad(attention_mask, (0, length - attention_mask.shape[1]), value=1)
    if config._attn_implementation not in ("eager", "sdpa"):
        return attention_mask
    masks = make_masks(config, plan, inputs_embeds, attention_mask, None, past_key_values, position_ids)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _in_prefix(prefix_mask: Tensor, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values):
    """A prefix token is seen by every token: by those of the prefix in both directions, by later ones anyway."""
    past = past_key_values.get_seq_length() if past_key_values is not None else 0
    length = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)[0] if past_key_values is not None else 0
    length = max(length, inputs_embeds.shape[1], 0 if attention_mask is None else attention_mask.shape[1])
    if not torch.compiler.is_compiling() and past > 0 and bool(prefix_mask[:, past:].any()):
        raise ValueError("a prefix attends to itself in both directions, so it must be given in one piece")
    prefix = F.pad(prefix_mask.bool(), (0, max(0, length - prefix_mask.shape[1])))
    return lambda batch, head, query, key: prefix[batch, key]
