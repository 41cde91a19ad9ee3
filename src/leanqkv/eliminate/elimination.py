"""Eliminations carried out on a model in memory or on a directory, with a certificate."""

import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoints.families import choose_family, export_tensors
from ..checkpoints.load import MODELS
from ..checkpoints.open import Checkpoint, open_checkpoint
from ..checkpoints.tensors import finite, weights_hash
from ..checkpoints.write import Progress, check_free, copy_tokenizer, save_config, write_checkpoint
from ..errors import LeanError
from ..files import write_json
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .certify import DTYPES, compare, difference, logits, random_inputs
from .dense import written_out
from .layernorm_free import disable_norms, norms_disabled, without_norms
from .transform import Request, Transformed, parse_request, transform

CERTIFICATE, CERTIFICATE_FORMAT = "certificate.json", 1
# Above this many parameters the result is certified as it was stored alone: in float64, before rounding, it would be
# computed a second time.
RECOMPUTED = 500_000_000
# A result further from the original than this, computed in float64 before anything is rounded, is a fault.
EXACT = 1e-6
Message = Callable[[str], None]
Models = tuple[LeanConfig, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Elimination:
    """A model with fewer weights and the certificate that it computes the same."""

    model: PreTrainedModel
    certificate: dict[str, Any]


def eliminate(
    model: PreTrainedModel | str | Path,
    remove: str,
    layer: str | int | None = None,
    *,
    max_condition: float = 1e8,
    dtype: torch.dtype = torch.float32,
    balance: bool = True,
    inputs: Mapping[str, Tensor] | None = None,
) -> Elimination:
    """The same function with fewer weights, solved in float64 and certified on its logits.

    Args:
        model: a model of ours, which is left as it is, or a directory of one of ours or of a supported class of
            transformers.
        remove: "query", "key", "value", "output" or several of them between commas; "block-diagonal"; "single-head".
        layer: of the projections, from 0; "0,3"; "all" or None for every layer.
        max_condition: refuse to solve with a matrix that is worse conditioned.
        dtype: of the result's weights.
        balance: take the equal form that loses least to rounding; else the plain one.
        inputs: what to certify on; else random token ids from a fixed seed.

    Raises:
        LeanError: not possible exactly, too badly conditioned, or weights that are not finite; says why.
    """
    if isinstance(model, PreTrainedModel):
        if not isinstance(model.config, LeanConfig):
            raise LeanError(f"a {type(model).__name__} is not a model of leanqkv; save it and give its directory")
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        config = model.config
        tensors: Mapping[str, Tensor] = {name: state[name] for name in config.plan.parameter_shapes}
    else:
        opened = open_checkpoint(Path(model))
        config, tensors = opened.config, opened.tensors
    request = parse_request(remove, layer, max_condition=max_condition, balance=balance)
    before = config, finite(tensors)
    result = transform(*before, request)
    stored = {name: tensor.to(dtype) for name, tensor in result.tensors.items()}
    found = MODELS[config.task](result.config).to(dtype)
    found.load_state_dict(stored, strict=not config.tie_word_embeddings or not result.config.tie_word_embeddings)
    after = result.config, stored
    report = certificate(before, result, after, request, dtype, inputs or random_inputs(config))
    return Elimination(found.eval(), report)


def eliminate_directory(
    source: Path,
    out: Path,
    request: Request,
    *,
    dtype: torch.dtype = torch.float32,
    stock: bool = False,
    family: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    message: Message = lambda text: None,
) -> dict[str, Any]:
    """Eliminates from the checkpoint in `source` into `out`, tensor by tensor, and returns the certificate.

    Args:
        stock: write a class of transformers, with what was eliminated written out as identities; else one of ours, with
            fewer tensors.
        family: which class; None for the plainest that can hold the model.
        dtype: of the stored weights.
        message: is told what is being done.

    Raises:
        LeanError: as `eliminate`; `out` is not empty; no class can hold the result; it is not the same function.
    """
    check_free(out)
    opened = open_checkpoint(source)
    before: Models = opened.config, finite(opened.tensors)
    message("solving")
    if stock and norms_disabled(opened.config):
        request = replace(request, keep_mean=True)  # the class will subtract the mean again
    result = transform(*before, request)

    def finish(directory: Path) -> None:
        copy_tokenizer(source, directory)
        if stock:
            stock_config.dtype = dtype
            stock_config.save_pretrained(directory)
        else:
            save_config(with_fields(result.config, dtype=dtype), directory)
        message("certifying")
        stored = open_checkpoint(directory)
        report = certificate(
            before, result, (stored.config, stored.tensors), request, dtype, inputs or random_inputs(opened.config)
        )
        report["weights_sha256"] = weights_hash(directory)
        report["source_sha256"] = weights_hash(source)
        write_json(directory / CERTIFICATE, report)
        certificates.append(report)

    certificates: list[dict[str, Any]] = []
    job = _job(opened, {**vars(request), "stock": stock, "family": family})
    if stock:
        stock_config, tensors = as_stock(result.config, result.tensors, family)
    else:
        tensors = result.tensors
    message("writing")
    write_checkpoint(out, tensors.shapes, tensors, dtype, job=job, finish=finish, progress=progress)
    return certificates[0]


def as_stock(config: LeanConfig, tensors: Mapping[str, Tensor], family: str | None = None) -> tuple[Any, Any]:
    """Configuration and lazy tensors of a class of transformers that computes the same, identities written out.

    A model without norms becomes a GPT-2 whose norms an epsilon disables, if its stream has mean zero.

    Raises:
        LeanError: no class can hold the model; says why.
    """
    config, tensors = written_out(config, tensors)
    if config.norm_type == "none":
        config, tensors = disable_norms(config, tensors)
    chosen = choose_family(config, family)
    return chosen.to_stock(config), export_tensors(chosen, config, tensors)


def certificate(
    before: Models,
    result: Transformed,
    stored: Models,
    request: Request,
    dtype: torch.dtype,
    inputs: Mapping[str, Tensor],
) -> dict[str, Any]:
    """What was removed, how well conditioned it was, and how far the logits moved.

    `exact` compares the result before its weights are rounded to `dtype`, in float64; `dtypes` what was stored. Where
    norms were disabled by an epsilon, both are against the function without norms, and `disabled_norms` says how far
    that is from the original's.

    Raises:
        LeanError: the unrounded result is not the original function.
    """
    config = before[0]
    reference = without_norms(*before) if norms_disabled(config) and not norms_disabled(result.config) else before
    parameters = [c.plan.count_parameters().total for c in (config, result.config)]
    exact = None
    if parameters[0] <= RECOMPUTED:
        found = logits(result.config, result.tensors, inputs, torch.float64)
        exact = difference(found, logits(*reference, inputs, torch.float64))
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
        "parameters": dict(zip(("before", "after"), parameters, strict=True)),
        "kv_bytes_per_token_bf16": dict(
            zip(
                ("before", "after"),
                (c.plan.kv_bytes_per_token(torch.bfloat16) for c in (config, result.config)),
                strict=True,
            )
        ),
        "config": {"before": config.as_overrides(), "after": result.config.as_overrides()},
        "inputs": {name: list(value.shape) for name, value in inputs.items()},
        "inputs_sha256": _hash_tensors(inputs),
        "dtype": str(dtype).removeprefix("torch."),
        "exact": exact,
        "dtypes": compare(reference, stored, inputs),
        "versions": versions(),
    }
    if reference is not before:
        found = logits(*before, inputs, torch.float64)
        report["disabled_norms"] = difference(found, logits(*reference, inputs, torch.float64))
    return report


def verify(one: Path, other: Path, inputs: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """How far the logits of the checkpoint `other` lie from those of `one`, in three dtypes.

    Raises:
        LeanError: they cannot be opened or compared.
    """
    first, second = open_checkpoint(one), open_checkpoint(other)
    inputs = inputs or random_inputs(first.config)
    return compare((first.config, finite(first.tensors)), (second.config, finite(second.tensors)), inputs, DTYPES)


def convert_format(
    source: Path,
    out: Path,
    *,
    stock: bool,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> tuple[LeanConfig, str]:
    """Writes the checkpoint in `source` as one of ours, or of a class of transformers; nothing else changes.

    Args:
        dtype: of the stored weights; None: that of the first tensor in `source`.

    Returns:
        our configuration of it, and the name of the class that was written.

    Raises:
        LeanError: it cannot be opened, or no class can hold it; `out` is not empty.
    """
    check_free(out)
    opened = open_checkpoint(source)
    tensors: Any = finite(opened.tensors)
    dtype = dtype or next(iter(tensors.values())).dtype
    shapes: Mapping[str, tuple[int, ...]] = opened.config.plan.parameter_shapes
    architecture = MODELS[opened.config.task].__name__
    config: Any = with_fields(opened.config, dtype=dtype)
    if stock:
        config, tensors = as_stock(opened.config, tensors, family)
        shapes, architecture = tensors.shapes, config.architectures[0]

    def finish(directory: Path) -> None:
        copy_tokenizer(source, directory)
        if stock:
            config.dtype = dtype
            config.save_pretrained(directory)
        else:
            save_config(config, directory)

    job = _job(opened, {"stock": stock, "family": family})
    write_checkpoint(out, shapes, tensors, dtype, job=job, finish=finish, progress=progress)
    return opened.config, architecture


def versions() -> dict[str, str]:
    from .. import __version__

    return {
        "leanqkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def _job(opened: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the content of a result: the source's files as they are, and the settings."""
    files = sorted(file for file in opened.directory.iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    sizes = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"source": str(opened.directory.resolve()), "files": sizes, "versions": versions(), **settings}


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
