"""Write identities out: every query, key, value and output as a plain matrix, for classes that know no others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..model.config import LeanConfig
from ..model.registry import Projection
from ..model.shapes import parameter_shapes
from ..presets.edit import with_fields
from .stream import PROJECTIONS
from .tensors import LazyTensors

DENSE = ("identity", "block_identity", "residual")


def to_dense(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """Return the same function with linear projections for identities, identity blocks and residual queries.

    Mechanisms that are no linear map stay as they are. So do keys that values are, or are made of, because values have
    no scale that could be written into them. If one layer has a bias, all layers get one, of zeros.
    """
    keys_reused = any(layer.value.reuses_keys or layer.value.reads_keys for layer in config.plan.layers)
    fields: dict[str, Any] = {}
    dense: dict[str, Projection] = {}
    scales: dict[str, float] = {}  # of QK-norm's weights: a scale before the norm would have no effect
    biased = {"attention_bias": config.attention_bias, "attention_output_bias": config.attention_output_bias}
    for slot, projection in PROJECTIONS.items():
        if slot == "key" and keys_reused:
            continue
        fields[slot] = [entry for entry in getattr(config, slot) if entry["type"] not in DENSE]
        for layer in config.plan.layers:
            mechanism = getattr(layer, slot)
            if mechanism.kind not in DENSE:
                continue
            attention = f"model.layers.{layer.block}.self_attn"
            dense[f"{attention}.{projection}"] = mechanism
            if config.qk_norm and slot in ("query", "key"):
                scales[f"{attention}.{slot[0]}_norm"] = mechanism.scale
            if mechanism.bias:
                biased["attention_output_bias" if slot == "output" else "attention_bias"] = True
    new = with_fields(config, **fields, **biased)
    shapes = parameter_shapes(new)

    def compute(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        shape = shapes[name]
        mechanism = dense.get(module)
        if kind == "bias" and name not in tensors:
            return torch.zeros(shape, dtype=torch.float64)
        if mechanism is None:
            offset = config.norm_offset
            return (tensors[name].double() + offset) * scales[module] - offset if module in scales else tensors[name]
        scale = 1.0 if config.qk_norm else mechanism.scale
        if mechanism.kind == "block_identity":
            return tensors[name] if kind == "bias" else _with_block(config, mechanism, module, tensors)
        if mechanism.kind == "residual":
            matrix = tensors[name].double()
            return scale / 2 * (matrix if kind == "bias" else matrix + torch.eye(*shape, dtype=torch.float64))
        return scale * (tensors[name].double() if kind == "bias" else torch.eye(*shape, dtype=torch.float64))

    return new, LazyTensors(shapes, compute)


def with_norm_offset(
    config: LeanConfig, tensors: Mapping[str, Tensor], offset: float
) -> tuple[LeanConfig, Mapping[str, Tensor]]:
    """Return the same function with another `norm_offset`; norm weights that change are float64, which is exact."""
    change = config.norm_offset - offset
    if not change:
        return config, tensors

    def compute(name: str) -> Tensor:
        return tensors[name].double() + change if name.endswith("norm.weight") else tensors[name]

    return with_fields(config, norm_offset=offset), LazyTensors(parameter_shapes(config), compute)


def _with_block(config: LeanConfig, options: Any, module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the whole weight, [heads * head_dim, hidden_size], of a projection that stores no identity block."""
    width: int = config.head_dim if options.width is None else options.width
    stored = tensors[f"{module}.weight"].unflatten(0, (-1, width))
    block = torch.eye(width, dtype=stored.dtype).expand(len(stored), -1, -1)
    heads = torch.cat((stored[..., : options.start], block, stored[..., options.start :]), dim=-1)
    if width < config.head_dim:
        plain = tensors[f"{module}.plain_weight"].to(stored.dtype).unflatten(0, (-1, config.head_dim - width))
        heads = torch.cat((plain, heads), dim=1)
    return heads.flatten(0, 1)
