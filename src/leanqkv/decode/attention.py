"""Attention of one query per sequence, as a decoding step has it, where PyTorch's own kernel is slow.

On a CPU `scaled_dot_product_attention` is slow in bfloat16 if there is one query. What `torch.compile` makes of the
same sum reads keys and values as they lie, converts in registers and keeps no intermediate of their size.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "leanqkv_decode"
RECOMPILATIONS = 64


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' sdpa attention: query [batch, heads, positions, head_dim]; key, value [batch, heads / group, key
    positions, head_dim]; returns [batch, positions, heads, head_dim]."""
    one = query.shape[2] == 1 and query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
    if one and scaling is not None and (kernel := _kernel()) is not None:
        grouped = query.squeeze(2).unflatten(1, (key.shape[1], -1))
        mask = attention_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
        return kernel(grouped, key, value, scaling, mask).flatten(1, 2)[:, None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def single_query(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    """query [batch, key heads, group, head_dim], mask additive [batch or 1, 1, 1, key positions] or None; returns the
    query's shape. Computed in float32."""
    scores = (query[:, :, :, None].float() * key[:, :, None].float()).sum(-1) * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    return (weights[..., None] * value[:, :, None].float()).sum(-2).to(query.dtype)


@functools.cache
def _kernel() -> Any:
    """The compiled `single_query`, or None where nothing can be compiled."""
    # Heads, groups, masks and single sequences are compiled one by one; past the limit PyTorch would give up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    compiled = torch.compile(single_query, dynamic=True)
    query, key = (torch.zeros(1, 2, n, 8, dtype=torch.bfloat16) for n in (2, 3))
    try:
        compiled(query, key, key, 1.0, None)
    except Exception:  # no compiler, or no room for what it writes: as many kinds of error
        return None
    return compiled


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
