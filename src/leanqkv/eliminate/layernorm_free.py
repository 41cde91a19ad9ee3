"""GPT-2 checkpoints whose LayerNorms were trained away: from norms that a huge epsilon disables to none.

Heimersheim 2024 (arXiv 2409.13710) and Baroni et al. 2025 (arXiv 2507.02559) publish them with `eps = 1e12` and weights
of `1e6 gamma`: `(x - mean) / sqrt(var + eps) * weight + bias` is `C x gamma + bias` up to var / (2 eps), with
`C = I - 11^T / d`. Karbevski & Mijoski 2025, Remark 2, apply their Theorem 4.2 to such models. The centring C is
singular and cannot stand in front of a weight that is to be inverted: it is folded into what writes the stream, gamma
and bias into what reads it.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .projections import Removal, is_solved_with
from .stream import Place, Stream, StreamTensor

# Above this an epsilon switches its norm off: real variances are far smaller.
DISABLED = 1e8


def norms_disabled(config: LeanConfig) -> bool:
    return config.norm_type == "layernorm" and config.norm_eps >= DISABLED


def without_norms(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """The function that the disabled norms stand for (the limit of a large epsilon), with `norm_type` "none".

    The head is untied, since gamma of the last norm goes into it; that norm's bias, divided by gamma, goes into the
    bias of the last MLP, which only the head sees.

    Raises:
        LeanError: the norms are not disabled, or the model has something this does not treat; says what.
    """
    if reason := why_not(config):
        raise LeanError(f"its norms cannot be removed exactly: {reason}")
    d, last = config.hidden_size, config.num_hidden_layers - 1
    new = with_fields(
        config,
        norm_type="none",
        norm_eps=LeanConfig().norm_eps,
        norm_bias=False,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    )
    stream = Stream(new)
    factor = 1 / math.sqrt(config.norm_eps)

    def norm(place: Place) -> tuple[Tensor, Tensor]:
        """gamma and bias of the norm through which `place` is read"""
        name = "model.norm"
        if place.layer <= last:
            name = f"model.layers.{place.layer}."
            name += "post_attention_layernorm" if place.middle else "input_layernorm"
        weight = tensors[f"{name}.weight"].double() * factor
        bias = tensors[f"{name}.bias"].double() if config.norm_bias else torch.zeros(d, dtype=torch.float64)
        return weight, bias

    def original(name: str, width: int) -> Tensor:
        """A bias of the original, or zeros where it had none."""
        return tensors[name].double() if name in tensors else torch.zeros(width, dtype=torch.float64)

    def compute(name: str) -> Tensor:
        touch = stream.touches.get(name)
        weight_name = name.removesuffix("bias") + "weight"
        reader = stream.touches.get(weight_name)
        if touch is not None and touch.writes:
            tensor = original(name, d) if name.endswith("bias") else tensors[name].double()
            centred = tensor - tensor.mean(touch.axis, keepdim=True)
            if name == f"model.layers.{last}.mlp.down_proj.bias":
                gamma, bias = norm(Place(last + 1))
                if not gamma.all():
                    raise LeanError("the last norm's weight has a zero, by which its bias would have to be divided")
                centred = centred + bias / gamma
            return centred
        if touch is not None:
            source = "model.embed_tokens.weight" if name == "lm_head.weight" and name not in tensors else name
            return tensors[source].double() * norm(touch.place)[0]
        if name.endswith("bias") and reader is not None and not reader.writes:
            weight = tensors[weight_name].double()
            return original(name, len(weight)) + weight @ norm(reader.place)[1]
        return tensors[name]

    return new, LazyTensors(new.plan.parameter_shapes, compute)


def why_not(config: LeanConfig) -> str | None:
    if not norms_disabled(config):
        return f"they are not switched off by their epsilon ({config.norm_eps:g}, below {DISABLED:g})"
    if config.task == "image_classification":
        return "it is a model of images"
    if config.block_type == "parallel":
        return "a parallel block reads the stream through two norms at one place"
    if config.qk_norm:
        return "QK-norm has the same epsilon, and is disabled along with them"
    if config.mlp_type == "moe":
        return "a router has no bias to take the norm's"
    if config.num_hidden_groups is not None or config.depth_average is not None or config.kv_lora_rank is not None:
        return "shared blocks, averages over depth and latents are not treated"
    blocked = Stream(with_fields(config, norm_type="none", norm_bias=False)).blocked
    return next(iter(blocked.values()), None)


def why_not_after(config: LeanConfig, removal: Removal) -> str | None:
    """What keeps a weight from being eliminated once `without_norms` has made `config`, beyond what always may."""
    if removal.slot == "output" and is_solved_with(config, removal):
        return "the mean that its norms subtract is folded into it, and so it is singular"
    return None


def disable_norms(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """A model without norms as one whose norms an epsilon of 1e12 switches off, for classes that always have them.

    Such a norm still subtracts the mean. The result is the same function, up to var / 2e12, only if that changes
    nothing: if everything that writes the stream has mean zero over its coordinates, but for a bias that the last layer
    adds.

    Raises:
        LeanError: the stream's mean is not zero, or biases are missing; says what.
    """
    eps = 1e12
    new = with_fields(config, norm_type="layernorm", norm_eps=eps, norm_bias=True)
    d, last = config.hidden_size, config.num_hidden_layers - 1
    free = f"model.layers.{last}.mlp.down_proj.bias"

    def check(touch: StreamTensor, tensor: Tensor) -> None:
        rounding = torch.finfo(tensor.dtype).eps
        tensor = tensor.double()
        means, size = tensor.mean(touch.axis), tensor.square().mean(touch.axis).sqrt()
        # Changed tensors are float64 and carry the error of a solve; stored ones that of their dtype.
        if touch.tensor != free and (means.abs() > max(rounding, 1e-9) * size).any():
            raise LeanError(
                f"{touch.tensor} writes rows whose mean is not zero: a LayerNorm would subtract it, and the function "
                "would change; eliminate with --format stock, which chooses a basis that keeps the mean"
            )

    stream = Stream(config)

    def compute(name: str) -> Tensor:
        if name in tensors:
            tensor = tensors[name]
            if (touch := stream.touches.get(name)) is not None and touch.writes:
                check(touch, tensor)
            return tensor
        if name == "model.norm.bias":
            return torch.full((d,), tensors[free].double().mean().item(), dtype=torch.float64)
        return torch.full((d,), math.sqrt(eps) if name.endswith("weight") else 0.0, dtype=torch.float64)

    return new, LazyTensors(new.plan.parameter_shapes, compute)
