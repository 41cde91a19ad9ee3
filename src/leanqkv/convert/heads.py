"""The value heads of a layer: split out of its tensors, assembled again after a conversion to first-layer values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.layout import LayerPlan
from ..presets.edit import with_fields

# What a conversion makes, and the entries of its report.
Made = tuple[LeanConfig, LazyTensors, dict[str, Any]]
# Projections of which each head is its own rows of every tensor, so that heads can change places.
MOVABLE = {"query": ("linear",), "key": ("linear", "block_identity")}


@dataclass(frozen=True)
class ValueHeads:
    """W_V and W_O of one layer, head by head, in float64.

    Attributes:
        value: [value heads, head_dim, hidden_size], the rows of W_V's transpose.
        value_bias: [value heads, head_dim], or None.
        output: [value heads, query heads per value head, hidden_size, head_dim], the columns of W_O's transpose.
    """

    value: Tensor
    value_bias: Tensor | None
    output: Tensor


@dataclass(frozen=True)
class ConvertedHeads(ValueHeads):
    """A layer's heads after a conversion: `value` holds the layer's own values alone, `output` still all heads.

    Attributes:
        order: the source's head, with its queries and key, at each place. The first places have the own values, the
            others take the first layer's.
        output_bias: [hidden_size], or None to keep the source's.
    """

    order: tuple[int, ...]
    output_bias: Tensor | None = None


def check_convertible(config: LeanConfig) -> None:
    """Check that the model has value heads of its own in every layer.

    Raises:
        LeanError: it cannot be converted; says why.
    """
    if config.task != "causal_lm":
        raise LeanError(f"its task is {config.task!r}. Only causal language models have a cache to make smaller")
    if config.kv_lora_rank is not None:
        raise LeanError("its keys and values are made from a latent (MLA). There are no value heads to replace")
    if (kind := config.key_value["type"]) != "projected":  # type: ignore[index]
        raise LeanError(f"it is converted already, or shares values in another way: key_value is {kind!r}")
    for layer in config.plan.layers:
        for slot, latent in (("key", layer.key_rank is not None), ("value", layer.value_rank is not None)):
            if latent:
                kind = getattr(layer, slot).kind
                raise LeanError(f"it is converted already: the {slot} of layer {layer.layer} is {kind!r}")
        for slot in ("value", "output"):
            if (kind := getattr(layer, slot).kind) != "linear":
                raise LeanError(f"the {slot} of layer {layer.layer} is {kind!r}. Only linear ones are converted")
    if config.num_hidden_groups is not None:
        raise LeanError(
            "its layers share blocks (num_hidden_groups), so the first layer's heads cannot differ from the others'"
        )


def check_reads_the_stream(config: LeanConfig) -> None:
    """Check that every block is attention without a gate that reads the residual stream alone, as a calibration does.

    Raises:
        LeanError: it reads more; says what.
    """
    if config.output_gate is not None:
        raise LeanError(
            "its heads are gated before W_O (output_gate), and a calibration fits W_O to heads without a gate: use "
            "`to=skipv1` `method=mean-v`"
        )
    readers = [
        f"the query of layer {layer.layer} is {layer.query.kind!r}, which reads the MLP below"
        for layer in config.plan.layers
        if layer.query.reads_mlp
    ]
    if config.depth_average is not None:
        readers.append("its layers read averages over depth (depth_average)")
    if config.hyper_connections is not None:
        readers.append("its layers read mixtures of several streams (hyper_connections)")
    if readers:
        raise LeanError(
            f"{readers[0]}. A calibration follows the residual stream alone: use `to=skipv1` `method=mean-v`"
        )


def may_be_cut(config: LeanConfig, layers: tuple[int, ...] | None) -> list[bool]:
    """Return whether a calibration may reduce a layer, for each.

    Args:
        layers: those that may be reduced; None: all.

    Raises:
        LeanError: the source cannot be converted, or it has no such layers; says why.
    """
    check_convertible(config)
    check_reads_the_stream(config)
    last = config.num_hidden_layers
    if layers is not None and (wrong := [layer for layer in layers if not 0 <= layer < last]):
        raise LeanError(f"`layers`: the model has layers 0 to {last - 1}, found {wrong[0]}")
    return [layers is None or layer in layers for layer in range(last)]


def target_config(config: LeanConfig, ratio: float) -> LeanConfig:
    """Return the source's configuration with first-layer values.

    Args:
        ratio: share of the value heads that take the first layer's values.

    Raises:
        LeanError: the source cannot be converted; says why.
    """
    check_convertible(config)
    heads = config.num_key_value_heads
    if not 0 < ratio <= 1 or floor(ratio * heads) in (0, heads):
        raise LeanError(
            f"a ratio of {ratio} replaces {floor(ratio * heads)} of {heads} value heads. At least one must go and "
            "one must stay: choose another `ratio`, or a model with more value heads"
        )
    return with_fields(config, key_value={"type": "first_layer_values", "ratio": ratio})


def immovable(layer: LayerPlan) -> str | None:
    """Return the query or key that ties the heads of a layer to their places, as "query 'identity'"; None for none.

    An identity, for one, takes head i from slice i of the input, and no tensor of the layer can change that.
    """
    kinds = {slot: getattr(layer, slot).kind for slot in MOVABLE}
    return next((f"{slot} {kind!r}" for slot, kind in kinds.items() if kind not in MOVABLE[slot]), None)


def split_heads(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int) -> ValueHeads:
    """Return the value heads of `layer`, in float64."""
    name = f"model.layers.{layer}.self_attn"
    value = tensors[f"{name}.v_proj.weight"].double().unflatten(0, (-1, config.head_dim))
    bias = tensors[f"{name}.v_proj.bias"].double().view(value.shape[:2]) if config.attention_bias else None
    output = tensors[f"{name}.o_proj.weight"].double().unflatten(1, (len(value), -1, config.head_dim))
    return ValueHeads(value, bias, output.permute(1, 2, 0, 3))


def felt_output(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int) -> Tensor:
    """Return W_O as the stream feels it, [heads, group, head_dim, hidden_size], in float64: times the weight of the
    norm that follows attention, if one does (`norm_placement`). Errors are measured by it."""
    output = split_heads(config, tensors, layer).output.mT
    if config.norm_placement == "before" or config.norm_type == "none":
        return output
    norm = f"model.layers.{layer}.attention_output_layernorm"
    felt = output * (tensors[f"{norm}.weight"].double() + config.norm_offset)
    return felt * tensors[f"{norm}.alpha"].double() if config.norm_type == "dyt" else felt


def value_with_bias(heads: ValueHeads) -> Tensor:
    """Return W_V head by head, [heads, hidden_size, head_dim], with its bias as one row more where there is one."""
    value = heads.value.transpose(1, 2)
    return value if heads.value_bias is None else torch.cat((value, heads.value_bias[:, None]), dim=1)


def output_with_bias(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int, output: Tensor) -> Tensor:
    """Return W_O as [rows, hidden_size] of [heads, group, head_dim, hidden_size], with its bias as one row more."""
    rows = output.flatten(0, 2)
    if not config.attention_output_bias:
        return rows
    return torch.cat((rows, tensors[f"model.layers.{layer}.self_attn.o_proj.bias"].double()[None]))


def assemble_tensors(
    config: LeanConfig, tensors: Mapping[str, Tensor], converted: Callable[[int], ConvertedHeads | None]
) -> Callable[[str], Tensor]:
    """Return a function from a tensor's name to the tensor in the converted model.

    Args:
        converted: the heads of a layer, or None where the layer stays as it is.
    """

    def compute(name: str) -> Tensor:
        layer, _, module = name.removeprefix("model.layers.").partition(".self_attn.")
        projection = module.split(".")[0]
        changes = {"q_proj", "k_proj", "v_proj", "o_proj"}
        if config.qk_norm == "width":  # its weights belong to heads
            changes |= {"q_norm", "k_norm"}
        if projection not in changes or (heads := converted(int(layer))) is None:
            return tensors[name]
        match module:
            case "v_proj.weight":
                return heads.value.flatten(0, 1)
            case "v_proj.bias":
                assert heads.value_bias is not None
                return heads.value_bias.flatten()
            case "o_proj.weight":
                return heads.output.permute(2, 0, 1, 3).flatten(1)
            case "o_proj.bias":
                return tensors[name] if heads.output_bias is None else heads.output_bias
            case _ if heads.order == tuple(range(len(heads.order))):
                return tensors[name]
            case _:
                assert not immovable(config.plan.layers[int(layer)])
                return tensors[name].unflatten(0, (len(heads.order), -1))[list(heads.order)].flatten(0, 1)

    return compute


def pools(num_heads: int, num_own: int) -> list[list[int]]:
    """Return `num_own` pools of neighboring heads, as equal as possible, larger ones first."""
    return [part.tolist() for part in np.array_split(np.arange(num_heads), num_own)]
