"""Linear layers whose weights are laid out for a few rows of input, as decoding has them.

On a CPU, oneDNN's own layout, into which a weight is copied once, is the faster one at one to some tens of rows.
"""

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..compat import has_hooks, hooks, pack_linear, packing_works
from .joined import join_projections

# Rows that the layout is chosen for; others are computed as well.
ROWS = 8


class PackedLinear(nn.Module):
    """`x W^T + b` with a packed copy of W; for inference."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.product = pack_linear(linear.weight, linear.bias, ROWS)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch can, for such a weight."""
    return weight.device.type == "cpu" and packing_works(weight.dtype)


def packed(model: nn.Module) -> Any:
    """A copy of the model that shares its parameters and hooks, with packed linear layers where that is possible.

    Layers with the same input are packed as one. A packed layer takes the memory of its weight once more. Modules with
    hooks, adapters or a way of their own to multiply stay as they are.
    """
    # Hooks as well: one that collects something goes on collecting it where its owner looks for it.
    shared = {id(kept): kept for kept in (*model.parameters(), *model.buffers(), *hooks(model))}
    packed_model = copy.deepcopy(model, shared)
    joined: list[nn.Linear] = []
    if all(can_pack(weight) for weight in model.parameters()):
        joined = join_projections(packed_model, partial(pack_linear, rows=ROWS))
    joined_ids = {id(layer) for layer in joined}
    for module in list(packed_model.modules()):
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or type(child).forward is not nn.Linear.forward:
                continue
            if id(child) not in joined_ids and can_pack(child.weight) and not has_hooks(child):
                setattr(module, name, PackedLinear(child))
    return packed_model
