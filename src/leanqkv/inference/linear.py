"""Linear layers whose weights are laid out for a few rows of input, as decoding has them.

On a CPU, oneDNN's own layout, into which a weight is copied once, is the faster one at one to some tens of rows.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn import functional as F

from ..compat import pack_linear, packing_works
from ..model.attention import LeanAttention
from ..model.attention_latent import LatentAttention
from ..model.latent import HOOKS, is_plain_linear
from .joined import join_projections

# Rows that the layout is chosen for; others are computed as well.
ROWS = 8


class PackedLinear(nn.Module):
    """`x W^T + b` with a packed copy of W; for inference."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.product = packed_product(linear.weight, linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs)


def packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return `x -> x W^T + b` with a packed copy of W, for some numbers of rows only: other inputs are padded.

    oneDNN generates code for every number of rows, a quarter of a megabyte of it, and keeps it.
    """
    product = pack_linear(weight, bias, ROWS)

    def padded(inputs: Tensor) -> Tensor:
        rows = inputs.shape[:-1].numel()
        step = 1 if rows <= ROWS else max(ROWS, 2 ** (rows.bit_length() - 3))  # four numbers from 64 to 128, and so on
        if not (missing := -rows % step):
            return product(inputs)
        flat = F.pad(inputs.reshape(rows, -1), (0, 0, 0, missing))
        return product(flat)[:rows].view(*inputs.shape[:-1], -1)

    return padded


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch can, for such a weight."""
    return weight.device.type == "cpu" and packing_works(weight.dtype)


def can_replace(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a plain linear layer whose weight can be packed."""
    return is_plain_linear(module) and can_pack(module.weight)  # type: ignore[arg-type]


def hooks(model: nn.Module) -> list[Any]:
    """Return what is registered to run when a module of `model` does."""
    kept = (getattr(module, kind, {}) for module in model.modules() for kind in HOOKS)
    return [hook for registered in kept for hook in registered.values()]


def packed(model: nn.Module) -> Any:
    """A copy of the model that shares its parameters and hooks, with packed linear layers where that is possible.

    Layers with the same input are packed as one. A packed layer takes the memory of its weight once more. Modules with
    hooks, adapters or a way of their own to multiply stay as they are; so do the up projections of latents, whose
    weights are read without a call when decoding.
    """
    # Hooks as well: one that collects something goes on collecting it where its owner looks for it.
    shared = {id(kept): kept for kept in (*model.parameters(), *model.buffers(), *hooks(model))}
    packed_model = copy.deepcopy(model, shared)
    joined: list[nn.Module] = []
    if all(can_pack(weight) for weight in model.parameters()):
        joined = join_projections(packed_model, packed_product)
    joined_ids = {id(layer) for layer in joined}
    for module in list(packed_model.modules()):
        is_attention = isinstance(module, LeanAttention | LatentAttention)
        folded = (module.k_up_proj, module.v_up_proj) if is_attention else ()
        for name, child in module.named_children():
            if id(child) not in joined_ids and child not in folded and can_replace(child):
                setattr(module, name, PackedLinear(child))
    return packed_model
