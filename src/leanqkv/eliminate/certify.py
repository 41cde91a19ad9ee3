"""Certificates: models compared on their logits, in several dtypes, one module of weights in memory at a time."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.initialization import no_init_weights

from ..checkpoints.disabled_norms import norms_disabled, without_norms
from ..checkpoints.open import MODELS, open_checkpoint
from ..checkpoints.tensors import finite
from ..environment import versions
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import count_parameters
from .transform import Message, Request, Transformed, no_message

CERTIFICATE_FORMAT = 1
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Modules that use their submodules' weights without calling them.
WHOLE = ("LatentAttention",)
# Above this many parameters the result is certified only as it was stored (`check_rounding`): its tensors are not
# solved for a second time, to compare them before rounding too.
RECOMPUTED = 500_000_000
# A result further from the original than this, computed in float64 before anything is rounded, is a fault.
EXACT = 1e-6
# How many times as far as arithmetic in a dtype the rounding of the weights to it may move the logits.
ROUNDINGS = 16
Model = tuple[LeanConfig, Mapping[str, Tensor]]


@torch.no_grad()
def logits(
    config: LeanConfig, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the logits, [tokens or images, outputs], float64, of a model computed in `dtype` with lazy weights."""
    register = nn.Module.register_parameter

    def without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        empty = None if parameter is None else nn.Parameter(parameter.to("meta", dtype), requires_grad=False)
        register(module, name, empty)

    # But no buffer: rotary frequencies stay in float32, as when a checkpoint is loaded.
    with patch.object(nn.Module, "register_parameter", without_data), no_init_weights():
        model: Any = MODELS[config.task](config)

    def in_dtype(name: str) -> Tensor:
        tied = name == "lm_head.weight" and name not in tensors
        return tensors["model.embed_tokens.weight" if tied else name].to(dtype)

    _load_when_called(model, in_dtype)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return model.eval()(**inputs).logits.double().flatten(0, -2)


def _load_when_called(model: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Let each module hold its parameters, `read` by name, only while it is called."""
    empty, left = dict(model.named_parameters(remove_duplicate=False)), set(model.state_dict())

    def fill(source: Callable[[str], Tensor], names: Sequence[str], *_: Any) -> None:
        for name in names:
            owner, own_name = name.rpartition(".")[::2]
            setattr(model.get_submodule(owner), own_name, nn.Parameter(source(name), requires_grad=False))

    for path, module in model.named_modules():  # a module comes before those in it
        whole = type(module).__name__ in WHOLE
        names = [name for name, _ in module.named_parameters(path, recurse=whole) if name in left]
        left -= {*names}
        module.register_forward_pre_hook(partial(fill, read, names))
        module.register_forward_hook(partial(fill, empty.__getitem__, names))


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
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Tensor]]:
    """Return per dtype how far both models lie from `reference`, and the logits of `after` per dtype.

    `reference` are the logits of `before` in float64. `original` is what the dtype itself costs, `result` the distance
    of `after`. Raises a LeanError for models whose logits cannot be compared.
    """
    if before[0].task != after[0].task:
        raise LeanError(f"a model for {before[0].task} and one for {after[0].task} cannot be compared")
    if (ids := inputs.get("input_ids")) is not None:
        _check_windows(before[0], after[0], ids.shape[1])
    report, results = {}, {}
    for name, dtype in DTYPES.items():
        message(f"comparing: the result in {name}")
        result = results[name] = logits(*after, inputs, dtype)
        if result.shape != reference.shape:
            raise LeanError(f"they have {reference.shape[1]:,} and {result.shape[1]:,} outputs: not one function")
        message(f"comparing: the original in {name}")
        original = reference if dtype == torch.float64 else logits(*before, inputs, dtype)
        report[name] = {"original": difference(original, reference), "result": difference(result, reference)}
    return report, results


def _check_windows(one: LeanConfig, other: LeanConfig, length: int) -> None:
    """Refuse sliding windows that differ where no sequence of `length` tokens shows it."""
    positions = min(one.max_position_embeddings, other.max_position_embeddings)
    for layers in zip(one.plan.layers, other.plan.layers, strict=False):
        first, second = (min(layer.window or positions, positions) for layer in layers)
        if first != second and min(first, second) >= length:
            raise LeanError(
                f"layer {layers[0].layer} attends to the last {first:,} positions in one and to the last {second:,} in "
                f"the other: not one function, which sequences of {length} tokens do not show"
            )


def check_rounding(
    results: Mapping[str, Tensor], reference: Tensor, result: Transformed, dtype: torch.dtype
) -> dict[str, float]:
    """Return how far the result stored in `dtype` lies from `reference`, and how far rounding may have moved it.

    `results` are its logits [tokens or images, outputs] by dtype, as `compare` returns them. Both numbers are relative
    distances of logits. Raises a LeanError where the first is the larger.
    """
    eps = torch.finfo(dtype).eps
    name = next((name for name, known in DTYPES.items() if known == dtype), "bf16")
    if not results[name].isfinite().all():
        raise LeanError(f"the result's logits computed in {name} are not finite; store it in a wider dtype")

    def size(outputs: Tensor) -> float:
        norms = outputs.norm(dim=-1)
        # Rounding sends a token whose experts are nearly tied to another one: of such models the median token counts.
        return (norms.median() if result.config.mlp_type == "moe" else norms.square().mean().sqrt()).item()

    distance = size(results["fp64"] - reference) / size(reference)
    # Weights are rounded once, and arithmetic in the same dtype rounds what they are multiplied with once: in one
    # network, in one basis, both move the logits about as far. In float32 the weights' share was at most 2.8 times the
    # arithmetic's in 558 random eliminations. Where rounding is no longer small, as in bfloat16 after a badly
    # conditioned change of basis, the two part; eps times the condition number bounds what a change of basis does.
    arithmetic = size(results[name] - results["fp64"]) / size(reference) * eps / torch.finfo(DTYPES[name]).eps
    worst = max(result.conditions.values(), default=1.0)
    explained = max(EXACT, ROUNDINGS * arithmetic, eps * worst)
    if not distance <= explained:
        raise LeanError(
            f"the stored result is not the same function: its logits lie {distance:.1e} off in float64, and rounding "
            f"to {str(dtype).removeprefix('torch.')} explains {explained:.1e}"
        )
    return {"distance": distance, "explained": explained}


def verify(
    one: Path, other: Path, inputs: Mapping[str, Tensor] | None = None, message: Message = no_message
) -> dict[str, Any]:
    """Return how far the logits of the checkpoint `other` lie from those of `one`, as `compare`.

    Of tokens at the first positions or at the last, where rotary frequencies may be others: the larger distance.
    """
    first, second = open_checkpoint(one), open_checkpoint(other)
    before, after = (first.config, finite(first.tensors)), (second.config, finite(second.tensors))
    places = [inputs or random_inputs(first.config)]
    positions = min(first.config.max_position_embeddings, second.config.max_position_embeddings)
    if (ids := places[0].get("input_ids")) is not None and (before_last := positions - ids.shape[1]) > 0:
        places.append({**places[0], "position_ids": (before_last + torch.arange(ids.shape[1])).expand_as(ids)})
    reports = []
    for given in places:
        message("comparing: the original in fp64")
        reports.append(compare(before, after, given, logits(*before, given, torch.float64), message)[0])
    return max(reports, key=lambda report: report["fp64"]["result"]["relative"])


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
    result, and `rounding` says how much of that rounding explains. Where an epsilon disabled the norms, all are against
    the function without norms, and `disabled_norms` says how far that is from the original's. Raises a LeanError if the
    unrounded result is not the original function, or the stored one is further off than its rounding explains.
    """
    config, inputs = before[0], inputs or random_inputs(before[0])
    centered = norms_disabled(config) and not norms_disabled(result.config)
    original = without_norms(*before) if centered else before
    configs = {"before": config, "after": result.config}
    parameters = {when: count_parameters(one).total for when, one in configs.items()}
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
    dtypes, results = compare(original, stored, inputs, reference, message)
    report = {
        "certificate": CERTIFICATE_FORMAT,
        "removed": list(request.remove),
        "layers": request.layers,
        "steps": list(result.steps),
        "balanced": request.balance,
        "conditions": result.conditions,
        "max_condition": request.max_condition,
        "parameters": parameters,
        "kv_bytes_per_token_bf16": {when: one.plan.kv_bytes_per_token(torch.bfloat16) for when, one in configs.items()},
        "config": {"before": config.as_overrides(), "after": result.config.as_overrides()},
        "inputs": {name: list(value.shape) for name, value in inputs.items()},
        "inputs_sha256": _hash_tensors(inputs),
        "dtype": str(dtype).removeprefix("torch."),
        "exact": exact,
        "dtypes": dtypes,
        "rounding": check_rounding(results, reference, result, dtype),
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
