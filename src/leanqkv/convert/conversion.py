"""Conversions carried out from one directory into another."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import finite
from ..checkpoints.write import Progress, check_free, copy_tokenizer, save_config, write_checkpoint
from ..data import TokenData
from ..errors import LeanError
from ..files import write_json
from ..model.config import LeanConfig
from ..model.registry import suggest
from ..presets.edit import with_fields
from .calibrated import Settings, calibrated
from .heads import pools, with_method
from .methods import CALIBRATED, METHODS
from .nonlinear_query import with_nonlinear_query

REPORT = "conversion.json"
TARGETS = ("skipv1", "nonlinear-query")


def calibration_tokens(data: TokenData, config: LeanConfig, tokens: int, length: int) -> np.ndarray:
    """[sequences, length] of the training split, evenly spread over it.

    Raises:
        LeanError: tokens beyond the vocabulary, or too little text; says how much is needed.
    """
    if data.vocab_size > config.vocab_size:
        raise LeanError(
            f"the data has {data.vocab_size:,} tokens, the model a vocabulary of {config.vocab_size:,}: they do not "
            "belong together"
        )
    sequences = max(1, tokens // length)
    if data.train_tokens < sequences * length:
        raise LeanError(
            f"{sequences * length:,} calibration tokens are asked for, the text has {data.train_tokens:,}; give more "
            "text, or fewer --tokens"
        )
    starts = np.linspace(0, data.train_tokens - length, sequences).astype(np.int64)
    stored = data.train()
    return np.stack([stored[start : start + length] for start in starts]).astype(np.int64)


def convert_directory(
    source: Path,
    out: Path,
    *,
    to: str,
    method: str = CALIBRATED,
    tokens: np.ndarray | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    calibrating: Progress | None = None,
) -> dict[str, Any]:
    """Converts the checkpoint in `source` and returns the report that is written beside the weights.

    Args:
        to: "skipv1" or "nonlinear-query".
        method: of METHODS or "calibrated", which needs `tokens` [sequences, length]; for skipv1.
        settings: of the calibrated method; its ratio is every method's.
        seed: of what is drawn anew for a nonlinear query.
        progress: called with bytes written and in all; `calibrating` with passes over the tokens.

    Raises:
        LeanError: a source that cannot be converted, or what does not go together; `out` is not empty.
    """
    check_free(out)
    started = time.perf_counter()
    settings = settings or Settings()
    if to not in TARGETS:
        raise LeanError(f"there is no conversion to {to!r}: {suggest(to, TARGETS)}")
    opened = open_checkpoint(source)
    config, stored = opened.config, finite(opened.tensors)
    report: dict[str, Any] = {"to": to, "source": config.as_overrides(), "calibration_tokens": 0}
    tensors: Mapping[str, Tensor]
    if to == "nonlinear-query":
        new, tensors = with_nonlinear_query(config, stored, seed)
        report["seed"] = seed
    elif method == CALIBRATED:
        if tokens is None:
            raise LeanError("the calibrated method needs calibration text: --calibration FILE")
        new, tensors, chosen = calibrated(config, stored, tokens, settings, calibrating or (lambda done, total: None))
        report |= {"method": method, "settings": asdict(settings), **chosen, "calibration_tokens": tokens.size}
    else:
        if method not in METHODS:
            raise LeanError(f"there is no method {method!r}: {suggest(method, [*METHODS, CALIBRATED])}")
        new, tensors = with_method(config, stored, METHODS[method], settings.ratio)
        report |= {"method": method, "ratio": settings.ratio}
        if method.startswith("mean"):
            report["pools"] = pools(config.num_key_value_heads, new.plan.layers[-1].computed_value_heads)  # type: ignore[arg-type]
    before, after = (c.plan for c in (config, new))
    report["parameters"] = [plan.count_parameters().total for plan in (before, after)]
    report["kv_bytes_per_token_bf16"] = [plan.kv_bytes_per_token(torch.bfloat16) for plan in (before, after)]

    def finish(directory: Path) -> None:
        copy_tokenizer(source, directory)
        save_config(with_fields(new, dtype=dtype), directory)
        write_json(directory / REPORT, report)

    job = {
        "source": str(source.resolve()),
        "report": dict(report),
        "tokens": None if tokens is None else int(tokens.sum()),
    }
    report["seconds"] = round(time.perf_counter() - started, 2)
    shapes = new.plan.parameter_shapes
    write_checkpoint(out, shapes, tensors, dtype, job=job, finish=finish, progress=progress)
    return report
