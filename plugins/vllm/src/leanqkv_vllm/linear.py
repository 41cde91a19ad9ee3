"""The model's matrix products by the routine that vLLM takes on a CPU; projections of one input are one product."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from leanqkv.inference.joined import JoinedProjections, join_projections, joint_map
from leanqkv.model.attention import LeanAttention
from leanqkv.model.attention_latent import LatentAttention
from leanqkv.model.latent import is_plain_linear


class Product(nn.Module):
    """`x W^T + b`, with W in the layout of vLLM's routine alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        dispatch_cpu_unquantized_gemm(self, remove_weight=True)
        self.bias, self.out_features = bias, len(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = self.cpu_linear(inputs.reshape(-1, inputs.shape[-1]), self.weight, self.bias)
        return flat.view(*inputs.shape[:-1], self.out_features)


def use_products(model: nn.Module) -> None:
    """Replace linear layers and joint projections in place. Weights that are read without a call stay as they are."""
    joined = {id(layer) for layer in join_projections(model, _product)}
    for module in list(model.modules()):
        if isinstance(project := getattr(module, "project", None), JoinedProjections):
            _drop_weights(project)
        is_attention = isinstance(module, LeanAttention | LatentAttention)
        read = (module.k_up_proj, module.v_up_proj) if is_attention else ()
        for name, child in module.named_children():
            if is_plain_linear(child) and id(child) not in joined and child not in read:
                setattr(module, name, Product(child.weight, child.bias))


def _product(maps: Sequence[tuple[Tensor, Tensor | None]]) -> Callable[[Tensor], Sequence[Tensor]]:
    joint, widths = Product(*joint_map(maps)), [len(weight) for weight, _ in maps]
    return lambda inputs: joint(inputs).split(widths, dim=-1)


def _drop_weights(project: JoinedProjections) -> None:
    """Keep the shapes of weights that the product has."""
    if project._once is None:
        return
    parts, product = project._once
    for part in parts:
        part.layer.weight = nn.Parameter(torch.empty_like(part.weight, device="meta"), requires_grad=False)
    project._once = [part._replace(weight=part.weight.to("meta"), bias=None) for part in parts], product
