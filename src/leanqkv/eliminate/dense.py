"""Identities written out: every query, key, value and output as a plain matrix, for classes that know no others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..model.config import LeanConfig
from ..model.plan import LayerPlan
from ..model.registry import Mechanism
from .respell import changed

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
DENSE = ("identity", "block_identity", "residual")


def written_out(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """The same function with linear projections in place of identities, identity blocks and residual queries.

    Mechanisms that are no linear map stay as they are. Where one layer has a bias all get one, of zeros.
    """
    fields: dict[str, Any] = {}
    owners: dict[str, tuple[Mechanism, LayerPlan]] = {}
    biased = {"attention_bias": config.attention_bias, "attention_output_bias": config.attention_output_bias}
    for slot, projection in PROJECTIONS.items():
        fields[slot] = [entry for entry in getattr(config, slot) if entry["type"] not in DENSE]
        for layer in config.plan.layers:
            mechanism = getattr(layer, slot)
            owners[f"model.layers.{layer.block}.self_attn.{projection}"] = mechanism, layer
            if getattr(mechanism.options, "bias", False):
                biased["attention_output_bias" if slot == "output" else "attention_bias"] = True
    new = changed(config, **fields, **biased)

    def compute(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if module not in owners:
            return tensors[name]
        mechanism, _ = owners[module]
        shape = new.plan.parameter_shapes[name]
        scale = getattr(mechanism.options, "scale", 1.0)
        if kind == "bias":
            if name not in tensors:
                return torch.zeros(shape, dtype=torch.float64)
            return tensors[name].double() * (scale / 2 if mechanism.kind == "residual" else scale)
        match mechanism.kind:
            case "identity":
                return scale * torch.eye(shape[0], dtype=torch.float64)
            case "residual":
                return scale / 2 * (torch.eye(shape[0], dtype=torch.float64) + tensors[name].double())
            case "block_identity":
                return _filled(config, mechanism.options, module, tensors)
            case _:
                return tensors[name]

    return new, LazyTensors(new.plan.parameter_shapes, compute)


def _filled(config: LeanConfig, options: Any, module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    assert config.head_dim is not None
    width: int = config.head_dim if options.width is None else options.width
    free = tensors[f"{module}.weight"].unflatten(0, (-1, width))
    block = torch.eye(width, dtype=free.dtype).expand(len(free), -1, -1)
    heads = torch.cat((free[..., : options.start], block, free[..., options.start :]), dim=-1)
    if width < config.head_dim:
        plain = tensors[f"{module}.plain_weight"].to(free.dtype).unflatten(0, (-1, config.head_dim - width))
        heads = torch.cat((plain, heads), dim=1)
    return heads.flatten(0, 1)
