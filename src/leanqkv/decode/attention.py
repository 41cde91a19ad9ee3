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
    if scaling is not None and (output := split_values(query, key, [value], attention_mask, scaling)) is not None:
        return output, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def split_values(
    query: Tensor, key: Tensor, values: list[Tensor], attention_mask: Tensor | None, scaling: float
) -> Tensor | None:
    """The same where the values of some heads lie in one tensor and those of the others in another, as a layer's own
    and those that it borrows do; [batch, positions, heads, head_dim]. None where the kernel does not apply."""
    if query.shape[2] != 1 or query.device.type != "cpu" or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    kernel = _kernel()
    if kernel is None:
        return None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=torch.float32).masked_fill(~attention_mask, -torch.inf)
    return kernel(query.squeeze(2).unflatten(1, (key.shape[1], -1)), key, values, scaling, attention_mask)


decode_attention.split_values = split_values  # type: ignore[attr-defined]  # see LeanAttention._attend


def single_query(query: Tensor, key: Tensor, values: list[Tensor], scaling: float, mask: Tensor | None) -> Tensor:
    """query [batch, key heads, group, head_dim], mask additive [batch or 1, 1, 1, key positions] or None; returns
    [batch, 1, heads, head_dim]. Computed in float32."""
    scores = ((query.float() * scaling)[:, :, :, None] * key[:, :, None].float()).sum(-1)
    if mask is not None:
        scores = scores + mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    totals = weights.sum(-1, keepdim=True)
    outputs = [
        ((part[..., None] * value[:, :, None].float()).sum(-2) / total).to(query.dtype)
        for part, total, value in zip(
            *(tensor.split([value.shape[1] for value in values], dim=1) for tensor in (weights, totals)),
            values,
            strict=True,
        )
    ]
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]).flatten(1, 2)[:, None]


@functools.cache
def _kernel() -> Any:
    """The compiled `single_query`, or None where nothing can be compiled."""
    # Heads, groups, masks and single sequences are compiled one by one; past the limit PyTorch would give up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    compiled = torch.compile(single_query, dynamic=True)
    query, key = (torch.zeros(1, 2, n, 8, dtype=torch.bfloat16) for n in (2, 3))
    try:
        compiled(query, key, [key], 1.0, None)
    except Exception:  # no compiler, or no room for what it writes: as many kinds of error
        return None
    return compiled


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
