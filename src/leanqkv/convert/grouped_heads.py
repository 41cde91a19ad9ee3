"""Fewer key and value heads: the mean of neighbouring heads, as grouped-query attention is started from a checkpoint.

Ainslie et al. 2023, section 2.1, https://arxiv.org/abs/2305.13245
"""

from collections.abc import Mapping

from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from ..presets.edit import with_fields
from .heads import Made, check_convertible, pools
from .targets import GroupedHeadsOptions


def ratios(config: LeanConfig) -> list[float]:
    """Return the shares of the source's key heads that can go, the smallest first."""
    heads = config.num_key_value_heads
    return [1 - kept / heads for kept in range(heads - 1, 0, -1) if heads % kept == 0]


def convert(config: LeanConfig, tensors: Mapping[str, Tensor], options: GroupedHeadsOptions) -> Made:
    """Return configuration and lazy tensors with fewer key and value heads, the same number in every layer, and the
    entries of the report.

    Raises:
        LeanError: the source cannot be converted, or not to that many heads; says why.
    """
    check_convertible(config)
    ratio, choices = options.ratio, ratios(config)
    heads = round(config.num_key_value_heads * (1 - ratio))
    if not any(abs(ratio - choice) < 0.005 for choice in choices):
        named = " or ".join(f"{choice:.3g}" for choice in choices)
        possible = f"a `ratio` of {named} is possible" if named else "there is nothing to pool"
        raise LeanError(
            f"a `ratio` of {ratio:g} cannot be pooled out of {config.num_key_value_heads} key heads; {possible}"
        )
    for layer in config.plan.layers:
        if layer.key.kind != "linear":
            raise LeanError(f"the key of layer {layer.layer} is {layer.key.kind!r}. Only linear ones are pooled")
    if config.qk_norm == "width":
        raise LeanError("its keys are normed all together (qk_norm 'width'), and their mean is another norm's")
    target = with_fields(config, num_key_value_heads=heads)

    def pooled(name: str) -> Tensor:
        tensor = tensors[name]
        if not any(f".self_attn.{side}_proj." in name for side in "kv"):
            return tensor
        by_group = tensor.double().unflatten(0, (heads, -1, config.head_dim))
        return by_group.mean(1).flatten(0, 1)

    report = {"ratio": ratio, "pools": pools(config.num_key_value_heads, heads)}
    return target, LazyTensors(parameter_shapes(target), pooled), report
