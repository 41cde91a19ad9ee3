"""The value heads of a layer, cut out of its tensors and put back: what all conversions to first-layer values share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import with_fields


@dataclass(frozen=True)
class ValueHeads:
    """W_V and W_O of a layer, head by head; float64.

    Attributes:
        value: [key/value heads, head_dim, hidden_size], the rows of W_V's transpose.
        value_bias: [key/value heads, head_dim], or None.
        output: [key/value heads, query heads of each, hidden_size, head_dim], the columns of W_O's transpose.
    """

    value: Tensor
    value_bias: Tensor | None
    output: Tensor


@dataclass(frozen=True)
class KeptHeads(ValueHeads):
    """The same after a conversion: `value` has the kept heads alone, `output` still all.

    Attributes:
        order: which of the source's heads, with its queries and key, stands at each place; the first ones keep a value.
        output_bias: [hidden_size], or None where the source's stays.
    """

    order: tuple[int, ...] = ()
    output_bias: Tensor | None = None


# The heads of a layer and how many keep a value of their own.
Method = Callable[[ValueHeads, int], KeptHeads]


def pools(heads: int, kept: int) -> list[list[int]]:
    """`heads` neighbours in `kept` pools, as equal as can be, larger ones first: two by two at half of the heads."""
    return [part.tolist() for part in np.array_split(np.arange(heads), kept)]


def target_config(config: LeanConfig, ratio: float) -> LeanConfig:
    """The source's configuration with first-layer values.

    Raises:
        LeanError: a source that this does not convert; says why.
    """
    if config.task != "causal_lm":
        raise LeanError(f"its task is {config.task!r}; only causal language models have a cache to make smaller")
    if config.kv_lora_rank is not None:
        raise LeanError("its keys and values are made from a latent (MLA); there are no value heads to replace")
    if (kind := config.key_value["type"]) != "projected":  # type: ignore[index]
        raise LeanError(f"it is converted already, or shares values in another way: key_value is {kind!r}")
    for layer in config.plan.layers:
        for slot in ("value", "output"):
            if (kind := getattr(layer, slot).kind) != "linear":
                raise LeanError(f"the {slot} of layer {layer.layer} is {kind!r}; only linear ones are converted")
    if config.num_hidden_groups is not None:
        raise LeanError("its layers share blocks, and the first layer's heads are not kept apart")
    heads = config.num_key_value_heads
    assert heads is not None
    if not 0 < ratio <= 1 or floor(ratio * heads) in (0, heads):
        raise LeanError(
            f"a ratio of {ratio} replaces {floor(ratio * heads)} of {heads} value heads; some must go and some stay"
        )
    return with_fields(config, key_value={"type": "first_layer_values", "ratio": ratio})


def split_heads(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int) -> ValueHeads:
    name = f"model.layers.{layer}.self_attn"
    value = tensors[f"{name}.v_proj.weight"].double().unflatten(0, (-1, config.head_dim))
    bias = None
    if config.attention_bias:
        bias = tensors[f"{name}.v_proj.bias"].double().view(value.shape[:2])
    output = tensors[f"{name}.o_proj.weight"].double().unflatten(1, (len(value), -1, config.head_dim))
    return ValueHeads(value, bias, output.permute(1, 2, 0, 3))


def with_method(
    config: LeanConfig, tensors: Mapping[str, Tensor], method: Method, ratio: float
) -> tuple[LeanConfig, LazyTensors]:
    """Every layer beyond the first converted by a method that looks at weights alone; tensors are lazy."""
    new = target_config(config, ratio)

    def converted(layer: int) -> KeptHeads:
        return method(split_heads(config, tensors, layer), new.plan.layers[layer].computed_value_heads)

    return new, LazyTensors(
        new.plan.parameter_shapes, assemble_tensors(config, tensors, lambda layer: converted(layer) if layer else None)
    )


def assemble_tensors(
    config: LeanConfig, tensors: Mapping[str, Tensor], converted: Callable[[int], KeptHeads | None]
) -> Callable[[str], Tensor]:
    """The tensors of a model whose layers have the heads that `converted` gives, where it gives any."""
    group = config.num_attention_heads // config.num_key_value_heads  # type: ignore[operator]

    def ordered(tensor: Tensor, order: tuple[int, ...], per_head: int) -> Tensor:
        rows = tensor.unflatten(0, (len(order), per_head * config.head_dim))  # type: ignore[operator]
        return rows[list(order)].flatten(0, 1)

    def compute(name: str) -> Tensor:
        layer, _, module = name.removeprefix("model.layers.").partition(".self_attn.")
        if not module or module.split(".")[0] not in ("q_proj", "k_proj", "v_proj", "o_proj"):
            return tensors[name]
        if (heads := converted(int(layer))) is None:
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
            case _:
                return ordered(tensors[name], heads.order, group if module.startswith("q_proj") else 1)

    return compute


def mean(tensor: Tensor | None, groups: list[list[int]]) -> Tensor | None:
    return None if tensor is None else torch.stack([tensor[group].mean(0) for group in groups])
