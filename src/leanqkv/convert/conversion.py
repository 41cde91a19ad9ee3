"""Convert the checkpoint in one directory into another."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import finite
from ..checkpoints.write import Progress, source_hashes, write_model
from ..data import TokenData
from ..environment import versions
from ..errors import LeanError
from ..files import check_free, remove, write_json
from ..job import unfinished
from ..model.config import LeanConfig
from ..model.registry import suggest
from ..model.shapes import count_parameters
from .calibrated import Settings, calibrated
from .grouped_heads import with_grouped_heads
from .latents import Latents
from .merged_values import MergedValues
from .methods import METHODS, pools, with_first_layer_values
from .nonlinear_query import with_nonlinear_query
from .sweeps import Reduction, Sweeps

REPORT = "conversion.json"
LATENTS, SEPARATE_LATENTS, MERGED_VALUES, SKIPV1, GQA, NONLINEAR_QUERY = TARGETS = (
    *("latents", "separate-latents", "merged-values", "skipv1", "gqa", "nonlinear-query"),
)
# Targets that take a share of the source's cache, and which by default.
BUDGETED, CACHE = (LATENTS, SEPARATE_LATENTS), 0.84
# Targets whose values are reduced in sweeps over the layers.
REDUCED = (*BUDGETED, MERGED_VALUES)
CALIBRATED = "calibrated"


def check_request(
    to: str,
    method: str,
    settings: Settings,
    has_text: bool,
    layers: tuple[int, ...] | None = None,
    on_device: bool = False,
    cache: float | None = None,
    ratio: float | None = None,
) -> None:
    """Refuse an unknown target or method, missing calibration text, and options that the method does not take.

    Args:
        ratio: None where it was not asked for.
    """
    if to not in TARGETS:
        raise LeanError(f"there is no conversion to {to!r}: {suggest(to, TARGETS)}")
    calibrates = to in (SKIPV1, *REDUCED) and method == CALIBRATED
    if to == SKIPV1 and not calibrates and method not in METHODS:
        raise LeanError(f"there is no method {method!r}: {suggest(method, [*METHODS, CALIBRATED])}")
    if to != SKIPV1 and method != CALIBRATED:
        raise LeanError(f"--method {method} is for --to skipv1; leave it out")
    if (to != SKIPV1 or not calibrates) and settings != Settings(ratio=settings.ratio):
        raise LeanError(
            "--no-choose, --no-refit-lent and --no-refit-values are for --to skipv1 --method calibrated; leave them out"
        )
    if calibrates and not has_text:
        what = f"the conversion to {to}" if to in REDUCED else "the calibrated method"
        raise LeanError(f"{what} needs calibration text: --calibration FILE")
    if has_text and not calibrates:
        raise LeanError(f"--calibration is for {', '.join(REDUCED)}, and skipv1 with --method calibrated; leave it out")
    if to not in REDUCED and (layers is not None or on_device):
        raise LeanError(f"--layers and --device are for --to {', '.join(REDUCED)}; leave them out")
    if to not in BUDGETED and cache is not None:
        raise LeanError(f"--cache is for --to {' and '.join(BUDGETED)}; leave it out")
    if to not in (MERGED_VALUES, SKIPV1, GQA) and ratio is not None:
        instead = "say by --cache how much to keep" if to in BUDGETED else "leave it out"
        raise LeanError(f"--ratio is for --to merged-values, skipv1 and gqa; {instead}")


def check_sequence_length(config: LeanConfig, length: int) -> None:
    """Check that the model has positions for sequences of `length` tokens.

    Raises:
        LeanError: it has not.
    """
    positions = config.max_position_embeddings
    if positions is not None and length > positions:
        raise LeanError(f"a --sequence-length of {length:,} is beyond the model's {positions:,} positions. Choose less")


def calibration_tokens(data: TokenData, config: LeanConfig, tokens: int, length: int) -> np.ndarray:
    """Return [sequences, length] tokens of the training split, evenly spread over it.

    Each sequence begins as the tokenizer begins a text.

    Raises:
        LeanError: the data has tokens beyond the model's vocabulary, or too little text; or sequences are too long.
    """
    check_sequence_length(config, length)
    if data.vocab_size > config.vocab_size:
        raise LeanError(
            f"the data has {data.vocab_size:,} tokens, the model a vocabulary of {config.vocab_size:,}: they do not "
            "belong together"
        )
    count = max(1, tokens // length)
    if data.train_tokens < count * length:
        raise LeanError(
            f"{count * length:,} calibration tokens are asked for, the text has {data.train_tokens:,}. Give more "
            "text, or fewer --tokens"
        )
    starts = np.linspace(0, data.train_tokens - length, count).astype(np.int64)
    stored, around = data.train(), data.around
    sequences = np.stack([stored[start : start + length] for start in starts]).astype(np.int64)
    if around is not None and around.begin is not None:
        sequences[:, 0] = around.begin
    return sequences


def convert_directory(
    source: Path,
    out: Path,
    *,
    to: str,
    method: str = CALIBRATED,
    tokens: np.ndarray | None = None,
    settings: Settings | None = None,
    cache: float | None = None,
    layers: tuple[int, ...] | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    calibrating: Progress = lambda done, total: None,
    message: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
    about: Mapping[str, Any] | None = None,
    evaluate: Callable[[Path], Mapping[str, Any]] = lambda directory: {},
    finish: Callable[[Path], object] = lambda directory: None,
) -> dict[str, Any]:
    """Convert the checkpoint in `source` and return the report that is written beside the weights.

    Args:
        to: one of TARGETS.
        method: for skipv1, one of METHODS or "calibrated".
        tokens: [sequences, length], for the targets in REDUCED and the calibrated method.
        settings: for skipv1's calibrated method; its ratio is also merged-values', every method's and gqa's.
        cache: for both kinds of latents: the share of the source's cache that the result takes at most; None: CACHE.
        layers, device: for the targets in REDUCED: those whose values may be reduced (None: all), and where it
            computes.
        seed: for the new matrices of a nonlinear query.
        message: called with what is done next; `calibrating` with passes over the tokens done and in all, `progress`
            with bytes written and in all.
        about: further entries of the report, which decide nothing about the weights.
        evaluate: given the directory with the new model, before it has its final name, returns the last entries of the
            report.
        finish: given the same directory with the report in it, writes what is made from the report.

    Raises:
        LeanError: a bad request, a source that cannot be converted, or `out` is not empty.
    """
    settings = settings or Settings()
    check_free(out, source)
    ratio = None if settings.ratio == Settings.ratio else settings.ratio
    check_request(to, method, settings, tokens is not None, layers, device is not None, cache, ratio)
    cache = CACHE if cache is None else cache
    with ExitStack() as held:
        started = time.perf_counter()
        checkpoint = open_checkpoint(source)
        config, stored = checkpoint.config, finite(checkpoint.tensors)
        report: dict[str, Any] = {"to": to, "source": config.as_overrides(), "calibration_tokens": 0}
        tensors: Mapping[str, Tensor]
        if to == NONLINEAR_QUERY:
            target, tensors = with_nonlinear_query(config, stored, seed)
            report["seed"] = seed
        elif to in REDUCED:
            assert tokens is not None
            work = held.enter_context(_calibration_directory(out))
            chosen: dict[str, Any] = {"cache": cache} if to in BUDGETED else {"ratio": settings.ratio}
            decides: dict[str, Any] = {
                "to": to,
                "source": source_hashes(checkpoint),
                "tokens": _hash(tokens),
                "versions": versions(),
            }
            decides |= {**chosen, "layers": layers, "device": str(device)}
            sweeps = Sweeps(
                config,
                stored,
                tokens,
                work,
                [reduction(to, config, stored, cache=cache, ratio=settings.ratio, layers=layers)],
                device=device,
                job=decides,
                progress=calibrating,
                message=message,
            )
            started -= sweeps.earlier_seconds
            (converted,) = sweeps.run()
            target, tensors = converted.config, converted.tensors
            report |= {"calibration_tokens": tokens.size, **chosen, "layers": converted.layers}
        elif to == GQA:
            target, tensors = with_grouped_heads(config, stored, settings.ratio)
            report |= {"ratio": settings.ratio, "pools": pools(*(c.num_key_value_heads for c in (config, target)))}  # type: ignore[arg-type]
        elif tokens is not None:
            target, tensors, fits = calibrated(config, stored, tokens, settings, progress=calibrating, message=message)
            report |= {"calibration_tokens": tokens.size, "method": method, "settings": asdict(settings), **fits}
        else:
            target, tensors = with_first_layer_values(config, stored, METHODS[method], settings.ratio)
            report |= {"method": method, "ratio": settings.ratio}
            if method.startswith("mean"):
                report["pools"] = pools(config.num_key_value_heads, target.plan.layers[-1].computed_value_heads)  # type: ignore[arg-type]
        report |= _sizes(config, target)
        decided = {"report": dict(report), "tokens_sha256": None if tokens is None else _hash(tokens)}
        report |= {"seconds": round(time.perf_counter() - started, 2), **(about or {})}

        def finish_directory(directory: Path) -> None:
            report.update(evaluate(directory))
            write_json(directory / REPORT, report)
            finish(directory)

        message("writing")
        write_model(
            checkpoint, out, target, tensors, dtype, settings=decided, finish=finish_directory, progress=progress
        )
        return report


def reduction(
    to: str,
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    *,
    cache: float = CACHE,
    ratio: float = Settings.ratio,
    layers: tuple[int, ...] | None = None,
) -> Reduction:
    """Return the reduction of a target of REDUCED; the arguments are `convert_directory`'s.

    Raises:
        LeanError: the source cannot be converted, or not by so much; says why.
    """
    if to in BUDGETED:
        return Latents(config, tensors, cache, layers, separate=to == SEPARATE_LATENTS)
    return MergedValues(config, tensors, ratio, layers)


@contextmanager
def _calibration_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that lets an interrupted calibration go on; it goes at the end, or after a refusal."""
    with unfinished(Path(os.path.realpath(out)), "calibration", "calibrating") as directory:
        yield directory
    remove(directory)


def _hash(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").data).hexdigest()


def _sizes(config: LeanConfig, target: LeanConfig) -> dict[str, list[int]]:
    """Parameters and KV bytes, before and after."""
    configs = config, target
    return {
        "parameters": [count_parameters(config).total for config in configs],
        "kv_bytes_per_token_bf16": [config.plan.kv_bytes_per_token(torch.bfloat16) for config in configs],
    }
