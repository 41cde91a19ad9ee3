"""Norms that divide by a constant are linear: folded into the weights around them, read and written.

Published GPT-2 checkpoints without LayerNorm (Heimersheim 2024, arXiv 2409.13710; Baroni et al. 2025, arXiv 2507.02559)
have an epsilon that switches it off, `eps = 1e12`, and weights of `1e6 gamma`: `(x - mean) / sqrt(var + eps) * weight +
bias` is `C x gamma + bias` up to var / (2 eps), with `C = I - 11^T / d`. Karbevski & Mijoski 2025, Remark 2, apply
their Theorem 4.2 to such models. The singular C is folded into the tensors that write the stream, where nothing is
inverted; gamma and bias into those that read it. So are norms whose standard deviation training has replaced by a
constant (train/norm_removal.py).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from ..presets.edit import with_fields
from .stream import Stream, StreamTensor
from .tensors import LazyTensors

# Above this an epsilon switches its norm off: real variances are far smaller.
DISABLED = 1e8
# Published checkpoints have 1e12. The root of this one, which norms get as weights, is exact in bfloat16.
EPSILON = 2.0**40
# What a norm divides by once training has removed its standard deviation, by its name behind the norm's.
CONSTANT = "constant"


def norms_disabled(config: LeanConfig) -> bool:
    """Return whether the epsilon of the model's LayerNorms switches them off."""
    return config.norm_type == "layernorm" and config.norm_eps >= DISABLED


def why_norms_stay(config: LeanConfig) -> str | None:
    """Return why `without_norms` cannot remove the norms, or None."""
    if not norms_disabled(config):
        return f"they are not switched off by their epsilon ({config.norm_eps:g}, below {DISABLED:g})"
    if config.qk_norm:
        return "QK-norm (qk_norm) has the same epsilon, and is disabled along with them"
    return why_not_folded(config)


def why_not_folded(config: LeanConfig) -> str | None:
    """Return why `fold_norms` cannot fold the norms into the weights around them, or None."""
    if config.norm_type not in ("layernorm", "rmsnorm"):
        return f"norm_type is {config.norm_type!r}, which divides by no standard deviation"
    if config.task == "image_classification":
        return "it is a model of images"
    if config.norm_placement != "before":
        return f"norm_placement is {config.norm_placement!r}: what the sublayers write goes through a norm"
    if config.norm_offset:
        return f"norm_offset is {config.norm_offset:g}, which is not treated"
    if config.norm_bias and config.mlp_type == "moe":
        return "mlp_type is 'moe', whose router has no bias to take the norm's"
    if config.hyper_connections is not None:
        return "hyper_connections norm the stream for mappings of their own, which nothing folds"
    for field in ("num_hidden_groups", "depth_average", "kv_lora_rank") if config.norm_bias else ():
        if (value := getattr(config, field)) is not None:
            return f"{field} is {value!r}, which is not treated"
    blocked = Stream(with_fields(config, norm_type="none", norm_bias=False)).blocked
    return next(iter(blocked.values()), None)


def without_norms(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """Return the function that the disabled norms stand for (the limit of a large epsilon), with `norm_type` "none".

    Raises a LeanError with the reason where `why_norms_stay`.
    """
    if reason := why_norms_stay(config):
        raise LeanError(f"its norms cannot be removed exactly: {reason}")
    new, folded = fold_norms(config, tensors, lambda norm: math.sqrt(config.norm_eps))
    return with_fields(new, norm_eps=LeanConfig().norm_eps), folded


def fold_norms(
    config: LeanConfig, tensors: Mapping[str, Tensor], deviation: Callable[[str], float]
) -> tuple[LeanConfig, LazyTensors]:
    """Return the same function with `norm_type` "none" for norms that divide by a constant, `deviation(name)`.

    The head is untied, since gamma of the last norm goes into it. The bias of that norm, divided by gamma, goes into
    the bias of the last MLP, which only the head reads. Raises a LeanError with the reason where `why_not_folded`.
    """
    if reason := why_not_folded(config):
        raise LeanError(f"its norms cannot be folded into its weights: {reason}")
    d, last = config.hidden_size, config.num_hidden_layers - 1
    biases = {"attention_bias": True, "mlp_bias": True} if config.norm_bias else {}
    new = with_fields(config, norm_type="none", norm_bias=False, tie_word_embeddings=False, **biases)
    stream, centers = Stream(new), config.norm_type == "layernorm"

    def bias_or_zeros(name: str, width: int) -> Tensor:
        return tensors[name].double() if name in tensors else torch.zeros(width, dtype=torch.float64)

    def norm(name: str) -> tuple[Tensor, Tensor]:
        """Return gamma, over its constant, and bias of the norm through which a tensor reads the stream."""
        norm = norm_before(config, name)
        return tensors[f"{norm}.weight"].double() / deviation(norm), bias_or_zeros(f"{norm}.bias", d)

    def compute(name: str) -> Tensor:
        tensor = stream.tensors.get(name)
        if tensor is not None and tensor.writes:
            values = bias_or_zeros(name, d) if name.endswith("bias") else tensors[name].double()
            centred = values - values.mean(tensor.axis, keepdim=True) if centers else values
            if not config.norm_bias or name != f"model.layers.{last}.mlp.down_proj.bias":
                return centred
            gamma, bias = norm("lm_head.weight")
            if not gamma.all():
                raise LeanError("the last norm's weight has a zero, by which its bias would have to be divided")
            return centred + bias / (gamma * new.residual_multiplier)
        if tensor is not None:
            source = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in tensors else name
            return tensors[source].double() * norm(name)[0]
        weight_name = name.removesuffix("bias") + "weight"
        if name.endswith("bias") and weight_name in stream.tensors:
            weight = tensors[weight_name].double()
            return bias_or_zeros(name, len(weight)) + weight @ norm(weight_name)[1]
        if name.endswith("v_up_proj.bias"):  # latent values: their bias is added behind the latent, which has none
            up, down = tensors[weight_name].double(), weight_name.replace("v_up_proj", "v_proj")
            constant = tensors[down].double() @ norm(down)[1]
            # The other columns, if any, read keys, which have a bias of their own.
            return bias_or_zeros(name, len(up)) + up[:, : len(constant)] @ constant
        return tensors[name]

    return new, LazyTensors(parameter_shapes(new), compute)


def norm_before(config: LeanConfig, name: str) -> str:
    """Return the name of the norm through which the tensor `name` reads the stream."""
    if not name.startswith("model.layers."):
        return "model.norm"
    block, module = name.split(".")[2:4]
    own = module == "mlp" and config.block_type != "parallel_shared_norm"
    return f"model.layers.{block}.{'post_attention' if own else 'input'}_layernorm"


def disable_norms(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """Return a model without norms as one whose norms an epsilon switches off, for classes that always have norms.

    Such a norm still subtracts the mean. The function stays the same, up to var / 2e12, only if everything that writes
    the stream has mean zero over its coordinates, but for the last layer's bias. Reading another tensor raises a
    LeanError.
    """
    new = with_fields(config, norm_type="layernorm", norm_eps=EPSILON, norm_bias=True)
    d, last = config.hidden_size, config.num_hidden_layers - 1
    last_bias = f"model.layers.{last}.mlp.down_proj.bias"
    stream = Stream(config)

    def compute(name: str) -> Tensor:
        if name in tensors:
            values, tensor = tensors[name], stream.tensors.get(name)
            if tensor is not None and tensor.writes and name != last_bias:
                _check_mean_zero(tensor, values)
            return values
        if name == "model.norm.bias":
            mean = tensors[last_bias].double().mean().item() if last_bias in tensors else 0.0
            return torch.full((d,), mean * config.residual_multiplier, dtype=torch.float64)
        return torch.full((d,), math.sqrt(EPSILON) if name.endswith("weight") else 0.0, dtype=torch.float64)

    return new, LazyTensors(parameter_shapes(new), compute)


def _check_mean_zero(tensor: StreamTensor, values: Tensor) -> None:
    rounding = torch.finfo(values.dtype).eps
    values = values.double()
    means, size = values.mean(tensor.axis), values.square().mean(tensor.axis).sqrt()
    # Changed tensors are float64 and carry the error of a solve; stored ones that of their dtype.
    if (means.abs() > max(rounding, 1e-9) * size).any():
        raise LeanError(
            f"{tensor.name} writes rows whose mean is not zero: a LayerNorm would subtract it, and the function "
            "would change; eliminate with `format=stock`, which chooses a basis that keeps the mean"
        )
