"""One matrix product for all projections of one input.

Karbevski 2026 (P2), section 4: with the nonlinear query, K, V and the first bottleneck layer are one product of output
2.5 d instead of 3 d; the RMSNorm before that layer becomes its weight, folded into W_1, and a division by the rms after
the product. https://github.com/MarkoKarbevski/beyond_query_linearity
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.attention import Attention
from ..model.latent import is_rewritten
from ..model.layers import GatedMLP
from ..model.projection_nonlinear import NonlinearProjection
from ..model.query_residual import ResidualQuery

# Makes, of weights [out, in] and biases, what gives the results of all these linear maps of one input.
MakeProduct = Callable[[Sequence[tuple[Tensor, Tensor | None]]], Callable[[Tensor], Sequence[Tensor]]]


class LinearPart(NamedTuple):
    """The linear map of its input that a projection begins with.

    layer: the module whose weight [out, in] and bias these are. finish: the projection's result, of the input
    and of what the map makes of it.
    """

    layer: nn.Module
    weight: Tensor
    bias: Tensor | None
    finish: Callable[[Tensor, Tensor], Tensor]


class JoinedProjections:
    """Takes the place of the `project` method of an attention or a gated MLP: the same results, up to rounding.

    Projections that do not begin with a plain linear map of the input (identities, adapters, quantised layers, hooked
    ones) are called as they are.
    """

    def __init__(self, module: Any, make_product: MakeProduct | None):
        """make_product: is called once, for inference; None joins the weights anew at every call, which follows their
        changes and gives them their gradients."""
        self.projections: list[nn.Module | None] = [getattr(module, name) for name in module.projections]
        self.query_reads_mlp = getattr(module, "query_reads_mlp", False)
        self.members = [i for i, one in enumerate(self.projections) if linear_part(one) is not None]
        self.layers = [part.layer for part in self._parts()]
        self._once: tuple[list[LinearPart], Callable[[Tensor], Sequence[Tensor]]] | None = None
        if make_product is not None and self.members:
            parts = self._parts()
            self._once = parts, make_product([(part.weight, part.bias) for part in parts])

    def __call__(self, hidden_states: Tensor, mlp_hidden: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if self._once is not None:
            parts, product = self._once
            pieces = product(hidden_states)
        else:
            parts = self._parts()
            weights, bias = joint_map([(part.weight, part.bias) for part in parts])
            pieces = F.linear(hidden_states, weights, bias).split([len(part.weight) for part in parts], dim=-1)
        joined = {i: part.finish(hidden_states, own) for i, part, own in zip(self.members, parts, pieces, strict=True)}
        results: list[Tensor | None] = []
        for i, projection in enumerate(self.projections):
            if i in joined or projection is None:
                results.append(joined.get(i))
            elif self.query_reads_mlp and i == 0:
                results.append(projection(hidden_states, mlp_hidden))
            else:
                results.append(projection(hidden_states))
        return tuple(results)

    def _parts(self) -> list[LinearPart]:
        return [part for i in self.members if (part := linear_part(self.projections[i])) is not None]


def join_projections(model: nn.Module, make_product: MakeProduct | None = None) -> list[nn.Module]:
    """Join, in place, the projections of one input in every attention and gated MLP of `model`.

    Names of tensors stay as they are. Returns the modules whose weights are now part of a joint product.
    """
    layers: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, Attention | GatedMLP):
            joined = JoinedProjections(module, make_product)
            if len(joined.members) > 1:
                module.project = joined  # type: ignore[method-assign]
                layers += joined.layers
    return layers


def linear_part(projection: nn.Module | None) -> LinearPart | None:
    """The linear map that `projection` begins with, or None where its weights alone do not decide what it computes.

    An adapter in place of a part is of another type, a quantised weight is not floating point, a hook would be passed
    over: such projections have none.
    """
    if projection is None or any(is_rewritten(module) for module in projection.modules()):
        return None
    if type(projection) is nn.Linear:
        return LinearPart(projection, projection.weight, projection.bias, lambda _, mapped: mapped)
    if type(projection) is ResidualQuery:
        return LinearPart(projection, projection.weight, projection.bias, projection.halve)
    if type(projection) is not NonlinearProjection or type(projection.down_proj) is not nn.Linear:
        return None
    return _bottleneck(projection) if type(projection.norm_in) in (nn.RMSNorm, nn.Identity) else None


def _bottleneck(projection: NonlinearProjection) -> LinearPart:
    """`RMSNorm(X) W_1 = (X diag(g) W_1) / rms(X)`, g the weight of the norm."""
    if not isinstance(projection.norm_in, nn.RMSNorm):
        return LinearPart(projection.down_proj, projection.down_proj.weight, None, projection.from_bottleneck)

    def finish(hidden_states: Tensor, mapped: Tensor) -> Tensor:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        length = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True, dtype=wide)
        mean_square = length.square() / hidden_states.shape[-1]
        mapped = mapped * torch.rsqrt(mean_square + projection.eps).to(mapped.dtype)
        return projection.from_bottleneck(hidden_states, mapped)

    return LinearPart(projection.down_proj, projection.down_proj.weight * projection.norm_in.weight, None, finish)


def joint_map(maps: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases one below the other."""
    bias = None
    if any(part is not None for _, part in maps):
        bias = torch.cat([weight.new_zeros(len(weight)) if part is None else part for weight, part in maps])
    return torch.cat([weight for weight, _ in maps]), bias
