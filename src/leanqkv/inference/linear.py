"""A model's copy for inference: linear layers whose products are the kernel's, projections of one input as one call."""

import copy
from typing import Any, TypeGuard

from torch import Tensor, nn

from ..model.attention import Attention
from ..model.latent import HOOKS, is_plain_linear
from .joined import join_projections
from .step import DTYPES, Product


class FewRowsLinear(nn.Module):
    """`x W^T + b` with a kernel for few rows of input; for inference."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.product = Product([(linear.weight, linear.bias)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product(inputs)[0]


def can_replace(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a plain linear layer whose weight the kernel can read."""
    return is_plain_linear(module) and module.weight.device.type == "cpu" and module.weight.dtype in DTYPES


def shared_copy(model: nn.Module) -> Any:
    """A copy of the model that shares its parameters, buffers and hooks."""
    # Hooks as well: one that collects something goes on collecting it where its owner looks for it.
    registered = (getattr(module, kind, {}) for module in model.modules() for kind in HOOKS)
    hooks = [hook for of_kind in registered for hook in of_kind.values()]
    shared = {id(kept): kept for kept in (*model.parameters(), *model.buffers(), *hooks)}
    return copy.deepcopy(model, shared)


def use_products(model: nn.Module) -> None:
    """Replace linear layers in place; those with the same input become one product.

    Modules with hooks, adapters or a way of their own to multiply stay as they are; so do the up projections of
    latents, whose weights are read without a call when decoding.
    """
    joined: set[int] = set()
    if all(weight.device.type == "cpu" and weight.dtype in DTYPES for weight in model.parameters()):
        joined = {id(layer) for layer in join_projections(model, Product)}
    for module in list(model.modules()):
        folded = (module.k_up_proj, module.v_up_proj) if isinstance(module, Attention) else ()
        for name, child in module.named_children():
            if id(child) not in joined and child not in folded and can_replace(child):
                setattr(module, name, FewRowsLinear(child))
