"""Certificates: models compared on their logits, in several dtypes, one module of weights in memory at a time."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import attach_align_device_hook
from torch import Tensor
from torch.nn import functional as F
from transformers.initialization import no_init_weights

from ..checkpoints.disabled_norms import norms_disabled, without_norms
from ..checkpoints.open import MODELS, open_checkpoint
from ..checkpoints.tensors import LazyTensors, finite
from ..environment import versions
from ..errors import LeanError
from ..model.config import LeanConfig
from .transform import Message, Request, Transformed, no_message

CERTIFICATE_FORMAT = 1
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Modules that use their submodules' weights without calling them.
WHOLE = ["LatentAttention"]
# Above this many parameters the result is certified only as it was stored, not in float64 before rounding as well.
RECOMPUTED = 500_000_000
# A result further from the original than this, computed in float64 before anything is rounded, is a fault.
EXACT = 1e-6
Model = tuple[LeanConfig, Mapping[str, Tensor]]


@torch.no_grad()
def logits(
    config: LeanConfig, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the logits, [tokens or images, outputs], float64, of a model computed in `dtype` with lazy weights."""
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: Any = MODELS[config.task](config)
    for module in model.modules():  # but no buffer: rotary frequencies stay in float32, as when a checkpoint is loaded
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))

    def in_dtype(name: str) -> Tensor:
        tied = name == "lm_head.weight" and name not in tensors
        return tensors["model.embed_tokens.weight" if tied else name].to(dtype)

    shapes = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    attach_align_device_hook(
        model,
        torch.device("cpu"),
        offload=True,
        weights_map=LazyTensors(shapes, in_dtype),
        preload_module_classes=WHOLE,
    )
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return model.eval()(**inputs).logits.double().flatten(0, -2)


def random_inputs(config: LeanConfig) -> dict[str, Tensor]:
    """Return two sequences of token ids, or eight images, the same for every certificate of one shape."""
    generator = torch.Generator().manual_seed(0)
    if config.task == "image_classification":
        shape = (8, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}  # type: ignore[arg-type]
    length = min(64, config.max_position_embeddings)
    return {"input_ids": torch.randint(config.vocab_size, (2, length), generator=generator)}


def difference(result: Tensor, reference: Tensor) -> dict[str, float]:
    """Return how far logits [tokens, outputs] lie from the reference, which must be finite and not all zero.

    The largest difference, that over the largest reference, mean KL(reference || result) in nats, and the share of
    tokens with the same likeliest output.
    """
    if not reference.isfinite().all() or not reference.any():
        problem = "all zero" if reference.isfinite().all() else "not finite"
        raise LeanError(f"the original's own logits are {problem}, so that nothing can be certified by them")
    worst = (result - reference).abs().max().item()
    divergence = F.kl_div(result.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="batchmean")
    return {
        "max_abs": worst,
        "relative": worst / reference.abs().max().item(),
        "kl": max(divergence.item(), 0.0) if math.isfinite(divergence) else math.inf,
        "agreement": (result.argmax(-1) == reference.argmax(-1)).double().mean().item(),
    }


def compare(
    before: Model, after: Model, inputs: Mapping[str, Tensor], reference: Tensor, message: Message = no_message
) -> dict[str, dict[str, dict[str, float]]]:
    """Return per dtype how far both models lie from `reference`, the logits of `before` in float64.

    `original` is what the dtype itself costs, `result` the distance of `after`. Raises a LeanError for models whose
    logits cannot be compared.
    """
    if before[0].task != after[0].task:
        raise LeanError(f"a model for {before[0].task} and one for {after[0].task} cannot be compared")
    report = {}
    for name, dtype in DTYPES.items():
        message(f"comparing: the result in {name}")
        result = logits(*after, inputs, dtype)
        if result.shape != reference.shape:
            raise LeanError(f"they have {reference.shape[1]:,} and {result.shape[1]:,} outputs: not one function")
        message(f"comparing: the original in {name}")
        original = reference if dtype == torch.float64 else logits(*before, inputs, dtype)
        report[name] = {"original": difference(original, reference), "result": difference(result, reference)}
    return report


def verify(
    one: Path, other: Path, inputs: Mapping[str, Tensor] | None = None, message: Message = no_message
) -> dict[str, Any]:
    """Return how far the logits of the checkpoint `other` lie from those of `one`, as `compare`."""
    first, second = open_checkpoint(one), open_checkpoint(other)
    before, after = (first.config, finite(first.tensors)), (second.config, finite(second.tensors))
    inputs = inputs or random_inputs(first.config)
    message("comparing: the original in fp64")
    return compare(before, after, inputs, logits(*before, inputs, torch.float64), message)


def certificate(
    before: Model,
    result: Transformed,
    stored: Model,
    request: Request,
    dtype: torch.dtype,
    inputs: Mapping[str, Tensor] | None = None,
    message: Message = no_message,
) -> dict[str, Any]:
    """Return what was removed, how well conditioned it was, and how far the logits moved on `inputs` or random ones.

    `exact` compares the result before its weights are rounded to `dtype`, in float64; `dtypes` compares the stored
    result. Where an epsilon disabled the norms, both are against the function without norms, and `disabled_norms` says
    how far that is from the original's. Raises a LeanError if the unrounded result is not the original function.
    """
    config, inputs = before[0], inputs or random_inputs(before[0])
    centered = norms_disabled(config) and not norms_disabled(result.config)
    original = without_norms(*before) if centered else before
    plans = {"before": config.plan, "after": result.config.plan}
    parameters = {when: plan.count_parameters().total for when, plan in plans.items()}
    message("certifying: the original in fp64")
    reference = logits(*original, inputs, torch.float64)
    exact = None
    if parameters["before"] <= RECOMPUTED:
        message("certifying: the result before rounding in fp64")
        exact = difference(logits(result.config, result.tensors, inputs, torch.float64), reference)
        if not exact["relative"] <= EXACT:
            raise LeanError(
                f"the result is not the same function: its logits differ by {exact['relative']:.1e} in float64, before "
                f"rounding; the matrices' condition numbers are up to {max(result.conditions.values(), default=1):.2g}"
            )
    report = {
        "certificate": CERTIFICATE_FORMAT,
        "removed": list(request.remove),
        "layers": request.layers,
        "steps": list(result.steps),
        "balanced": request.balance,
        "conditions": result.conditions,
        "max_condition": request.max_condition,
        "parameters": parameters,
        "kv_bytes_per_token_bf16": {when: plan.kv_bytes_per_token(torch.bfloat16) for when, plan in plans.items()},
        "config": {"before": config.as_overrides(), "after": result.config.as_overrides()},
        "inputs": {name: list(value.shape) for name, value in inputs.items()},
        "inputs_sha256": _hash_tensors(inputs),
        "dtype": str(dtype).removeprefix("torch."),
        "exact": exact,
        "dtypes": compare(original, stored, inputs, reference, message),
        "versions": versions("leanqkv", "torch", "transformers", "safetensors"),
    }
    if centered:
        report["disabled_norms"] = difference(logits(*before, inputs, torch.float64), reference)
    return report


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
