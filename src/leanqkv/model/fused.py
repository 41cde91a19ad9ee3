"""One matrix product for every projection that begins with a linear map of the same input.

Karbevski 2026 (P2), section 4: with the nonlinear query, K, V and the first bottleneck layer are one product of output
2.5 d instead of 3 d. The weights stay where they are, under their own names; they are joined for the moment of use.
https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Below this many tokens, joining the weights costs more than the smaller number of products saves: a decoding step
# reads every weight once, joining them reads and writes them once more. Measured by benchmarks/fused_projection.py.
MIN_TOKENS = 256


class InputLinear(nn.Linear):
    """A linear map of a layer's input that may be fused with others.

    What a projection must offer for that: `input_map`, the weight [out, in] and bias of the linear map it begins with,
    `finish`, what it makes of the input and of what that map makes of it, and `input_layer`, whose weight that is.
    """

    @property
    def input_layer(self) -> nn.Linear:
        return self

    def input_map(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def finish(self, hidden_states: Tensor, mapped: Tensor) -> Tensor:
        return mapped


class Joined(NamedTuple):
    """The linear maps that several projections begin with, as one.

    members: the places of those projections among all. widths: outputs of each.
    product: computes the joined map, [..., in] to [..., sum of widths].
    """

    members: tuple[int, ...]
    widths: tuple[int, ...]
    product: Callable[[Tensor], Tensor]


def _linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=weight, bias=bias)


def join(
    projections: Sequence[nn.Module | None],
    product: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]] = _linear,
) -> Joined | None:
    """Those that can be joined; None if there are not two. `product` makes a linear map of weight and bias."""
    members = tuple(i for i, p in enumerate(projections) if p is not None and _can_fuse(p))
    if len(members) < 2:
        return None
    maps = [projections[i].input_map() for i in members]  # type: ignore[union-attr,operator]
    weight = torch.cat([weight for weight, _ in maps])
    bias = None
    if any(b is not None for _, b in maps):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in maps])
    return Joined(members, tuple(len(w) for w, _ in maps), product(weight, bias))


def project(
    projections: Sequence[nn.Module | None], hidden_states: Tensor, fuse: bool, joined: Joined | None = None
) -> list[Tensor | None]:
    """What each projection makes of `hidden_states` [..., hidden_size], in order; None for None.

    The result of a fused projection equals that of the projection alone up to rounding. `joined` is what `join` made of
    these projections beforehand, and is then used for any number of tokens.
    """
    results: list[Tensor | None] = [None] * len(projections)
    if joined is None and fuse and hidden_states.numel() >= MIN_TOKENS * hidden_states.shape[-1]:
        joined = join(projections)
    if joined is not None:
        mapped = joined.product(hidden_states).split(joined.widths, dim=-1)
        for i, part in zip(joined.members, mapped, strict=True):
            results[i] = projections[i].finish(hidden_states, part)  # type: ignore[union-attr,operator]
    for i, projection in enumerate(projections):
        if projection is not None and results[i] is None:
            results[i] = projection(hidden_states)
    return results


def _can_fuse(projection: nn.Module) -> bool:
    """Whether its weights alone decide what a projection computes. An adapter in place of a part has no `input_map` of
    its own or is no `nn.Linear`, a quantised weight is not floating, a hook would be passed over: those run alone."""
    if not hasattr(type(projection), "input_map"):
        return False
    modules = list(projection.modules())
    plain = all(type(module) in _PLAIN or module is projection for module in modules if _holds_weights(module))
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules
    )
    return plain and not hooked and all(p.is_floating_point() for p in projection.parameters())


_PLAIN = (nn.Linear, nn.RMSNorm, nn.LayerNorm)


def _holds_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None or len(list(module.children())) > 0
