"""One pass through a model that keeps layer outputs, head outputs and attention weights; how far its logits spread."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compat import attention_implementation
from ..model.causal_lm import LeanForCausalLM


@dataclass(frozen=True)
class Observation:
    """Per layer, in order; on the CPU, since not every device knows float64.

    Attributes:
        layers: the block's output, [batch, positions, hidden_size]; before DenseFormer's average, where there is one.
        heads: what every head puts out, before W_O, [batch, positions, heads, head_dim].
        patterns: attention weights, [batch, heads, positions, key positions].
    """

    layers: list[Tensor]
    heads: list[Tensor]
    patterns: list[Tensor]


@torch.no_grad()
def observe(model: LeanForCausalLM, tokens: Tensor) -> Observation:
    """Run `tokens`, [batch, positions] int64, through a model in evaluation mode with eager attention.

    Works for any mechanism: heads are read where W_O takes them, and latent attention returns its weights too.
    """
    seen = Observation([], [], [])
    plans = iter(model.config.plan.layers)  # blocks that share weights are called once for every layer

    def attended(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.heads.append(inputs[0].cpu().unflatten(-1, (next(plans).num_query_heads, -1)))

    with ExitStack() as restored:
        restored.callback(model.set_attn_implementation, attention_implementation(model) or "sdpa")
        model.set_attn_implementation("eager")
        for block in model.model.layers:
            for hook in (
                block.register_forward_hook(lambda _m, _in, out: seen.layers.append(out[0].cpu())),
                block.self_attn.register_forward_hook(lambda _m, _in, out: seen.patterns.append(out[1].cpu())),
                block.self_attn.o_proj.register_forward_pre_hook(attended),
            ):
                restored.enter_context(hook)
        model.model(input_ids=tokens, use_cache=False)
    return seen


def logit_spread(patterns: Tensor, window: int | None = None, bidirectional: bool = False) -> float:
    """Return the standard deviation of a query's logits over the keys that it sees, root mean square over queries.

    What a query adds to all its logits alike does not change the softmax and does not count, so the weights say it all:
    [batch, heads, positions, key positions]. A position that sees one key is left out, such as the first of a causal
    model. A weight that is zero in its dtype counts as the smallest that is not. The spread is that of Karbevski &
    Mijoski 2025, appendix B, https://arxiv.org/abs/2510.23912.
    """
    n = patterns.shape[-1]
    distance = torch.arange(n, device=patterns.device)[:, None] - torch.arange(n, device=patterns.device)
    seen = (
        torch.ones_like(distance, dtype=torch.bool) if bidirectional else (distance >= 0) & (distance < (window or n))
    )
    logits = patterns.clamp_min(torch.finfo(patterns.dtype).tiny).double().log().masked_fill(~seen, 0)
    number = seen.sum(-1, keepdim=True)
    centred = (logits - logits.sum(-1, keepdim=True) / number).masked_fill(~seen, 0)
    variance = centred.square().sum(-1) / number[:, 0]
    several = number[:, 0] > 1
    return variance[..., several].mean().sqrt().item()


def logit_spreads(model: LeanForCausalLM, tokens: Tensor) -> list[float]:
    """Return `logit_spread` of every layer, on `tokens` [batch, positions]."""
    layers = zip(observe(model, tokens).patterns, model.config.plan.layers, strict=True)
    return [logit_spread(pattern, layer.window, model.config.bidirectional) for pattern, layer in layers]
