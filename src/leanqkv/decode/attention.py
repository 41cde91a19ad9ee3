"""Attention of one query per sequence, as a decoding step has it, where PyTorch's own kernel is slow.

On a CPU `scaled_dot_product_attention` is slow in bfloat16 if there is one query. What `torch.compile` makes of the
same sum reads keys and values as they lie, converts in registers and keeps no intermediate of their size.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..model.attention import Part

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
    if scaling is not None and (output := together([(query, key, value, scaling)], attention_mask)) is not None:
        return output, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def together(parts: Sequence[Part], attention_mask: Tensor | None) -> Tensor | None:
    """Attention of parts with different heads, one behind the other: [batch, 1, heads, head_dim]. So the values of a
    layer and those that it borrows need no joining and no second call. None where the kernel does not apply."""
    query = parts[0][0]
    if query.shape[2] != 1 or query.device.type != "cpu" or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    kernel = _kernel()
    if kernel is None:
        return None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=torch.float32).masked_fill(~attention_mask, -torch.inf)
    return kernel([(q.squeeze(2).unflatten(1, (k.shape[1], -1)), k, v, s) for q, k, v, s in parts], attention_mask)


decode_attention.together = together  # type: ignore[attr-defined]  # see LeanAttention


def single_queries(parts: Sequence[Part], mask: Tensor | None) -> Tensor:
    """`single_query` of every part, [batch, 1, heads, head_dim]."""
    outputs = [single_query(*part, mask).flatten(1, 2) for part in parts]
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0])[:, None]


def single_query(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    """query [batch, key heads, group, head_dim], mask additive [batch or 1, 1, 1, key positions] or None; returns the
    query's shape. Computed in float32."""
    scores = ((query.float() * scaling)[:, :, :, None] * key[:, :, None].float()).sum(-1)
    if mask is not None:
        scores = scores + mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    summed = (weights[..., None] * value[:, :, None].float()).sum(-2)
    return (summed / weights.sum(-1, keepdim=True)).to(query.dtype)


@functools.cache
def _kernel() -> Any:
    """The compiled `single_queries`, or None where nothing can be compiled."""
    # Heads, groups, masks and single sequences are compiled one by one; past the limit PyTorch would give up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    compiled = torch.compile(single_queries, dynamic=True)
    query, key = (torch.zeros(1, 2, n, 8, dtype=torch.bfloat16) for n in (2, 3))
    try:
        compiled([(query, key, key, 1.0)], None)
    except Exception:  # no compiler, or no room for what it writes: as many kinds of error
        return None
    return compiled


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
