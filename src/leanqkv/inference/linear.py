"""Linear layers whose weights are laid out for a few rows of input, as decoding has them.

On a CPU, oneDNN's own layout, into which a weight is copied once, is the faster one at one to some tens of rows.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..model.fused import join

# Rows that the layout is chosen for; others are computed as well.
ROWS = 8


class PackedLinear(nn.Module):
    """`x W^T + b` with a packed copy of W; for inference."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.product = _packed_product(linear.weight, linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs)


def _packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether this build of PyTorch can, for such a weight."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def packed(model: nn.Module) -> Any:
    """A copy of the model that shares its parameters, with packed linear layers where that is possible.

    Layers with the same input are packed as one. A packed layer takes the memory of its weight once more. Modules with
    hooks, adapters or a way of their own to multiply stay as they are.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    found = copy.deepcopy(model, shared)
    modules: list[Any] = list(found.modules())
    in_joined: set[int] = set()
    for module in modules:
        if not hasattr(module, "joinable_inputs") or not all(can_pack(weight) for weight in module.parameters()):
            continue
        projections = module.joinable_inputs()
        module.joined = join(projections, _packed_product)
        if module.joined is not None:
            in_joined |= {id(projections[i].input_layer) for i in module.joined.members}
    for module in modules:
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or type(child).forward is not nn.Linear.forward:
                continue
            if id(child) in in_joined:
                continue
            if can_pack(child.weight) and not (child._forward_hooks or child._forward_pre_hooks):
                setattr(module, name, PackedLinear(child))
    return found
