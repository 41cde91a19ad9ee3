"""Convert a checkpoint into another."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.open import Checkpoint
from ..checkpoints.tensors import finite
from ..checkpoints.write import Progress, source_hashes, write_model
from ..data.token_files import TokenData, tokens_hash
from ..environment import check_device, versions
from ..errors import LeanError, listed
from ..files import check_free, remove, write_json
from ..job import unfinished
from ..model.config import LeanConfig
from ..model.shapes import count_parameters
from .estimate import Estimate, estimate
from .sweeps import Reduction, Sweeps
from .targets import CALIBRATED, SWEPT, TARGETS, read_options

REPORT = "conversion.json"


def sequence_length(config: LeanConfig, asked: int | None) -> int:
    """Return the length of calibration sequences: the one asked for, else 512 tokens, or all positions.

    Raises:
        LeanError: it exceeds the model's positions.
    """
    positions = config.max_position_embeddings
    length = asked or min(512, positions)
    if length > positions:
        raise LeanError(f"a `sequence_length` of {length:,} is beyond the model's {positions:,} positions. Choose less")
    return length


def calibration_tokens(data: TokenData, config: LeanConfig, tokens: int, length: int) -> np.ndarray:
    """Return [sequences, length] tokens of the training split, evenly spread over it.

    Each sequence begins as the tokenizer begins a text.

    Raises:
        LeanError: the data has tokens beyond the model's vocabulary, or too little text; or sequences are too long.
    """
    sequence_length(config, length)
    if data.vocab_size > config.vocab_size:
        raise LeanError(
            f"the data has {data.vocab_size:,} tokens, the model a vocabulary of {config.vocab_size:,}: they do not "
            "belong together"
        )
    if data.train_tokens < length:
        raise LeanError(
            f"the calibration text has {data.train_tokens:,} tokens, fewer than one sequence of {length:,}. Give more "
            "text, or a shorter `sequence_length`"
        )
    count = max(1, tokens // length)
    if data.train_tokens < count * length:
        raise LeanError(
            f"{count * length:,} calibration tokens are asked for, the text has {data.train_tokens:,}. Give more "
            "text, or fewer `tokens`"
        )
    starts = np.linspace(0, data.train_tokens - length, count).astype(np.int64)
    stored, around = data.train(), data.around
    sequences = np.stack([stored[start : start + length] for start in starts]).astype(np.int64)
    if around is not None and around.begin is not None:
        sequences[:, 0] = around.begin
    return sequences


class Conversion:
    """A conversion of one checkpoint: its options are checked, and that the source can be converted.

    Args:
        to: one of TARGETS.
        options: of that target.

    Raises:
        LeanError: an unknown target, options that it does not take, a device that is not there, or a source that cannot
            be converted.
    """

    def __init__(self, source: Checkpoint, to: str = "latents", **options: Any):
        self.source, self.to, self.options = source, to, read_options(to, options)
        self._device = torch.device(check_device(getattr(self.options, "device", None) or "cpu"))
        self._made = TARGETS[to].make(source.config, finite(source.tensors), self.options)
        self.calibrates = to in SWEPT or getattr(self.options, "method", "") == CALIBRATED

    def check_text(self, given: bool) -> None:
        """Check that there is calibration text if and only if the conversion is fitted to it.

        Raises:
            LeanError: it is missing, or would not be read.
        """
        if self.calibrates and not given:
            raise LeanError(f"the conversion to {self.to} needs calibration text: `calibration` FILE")
        if given and not self.calibrates:
            raise LeanError(
                f"`calibration` is for {', '.join(SWEPT)}, and skipv1 with `method={CALIBRATED}`; leave it out"
            )

    def estimate(self, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Estimate:
        """Return what it takes on this machine with calibration sequences of that number and length.

        Raises:
            LeanError: it is not fitted in sweeps over the layers.
        """
        if not isinstance(self._made, Reduction):
            raise LeanError(f"`dry_run` is for {listed(SWEPT)}, and the conversion is to {self.to}; leave it out")
        return estimate(self._made, self.source, shape, dtype, self._device)

    def write(
        self,
        out: Path,
        tokens: np.ndarray | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        calibrating: Progress = lambda done, total: None,
        message: Callable[[str], None] = lambda text: None,
        progress: Progress = lambda done, total: None,
        about: Mapping[str, Any] | None = None,
        evaluate: Callable[[Path], Mapping[str, Any]] = lambda directory: {},
        finish: Callable[[Path], object] = lambda directory: None,
    ) -> dict[str, Any]:
        """Write the result to `out` and return the report that is written beside the weights.

        Args:
            tokens: [sequences, length], for conversions that calibrate.
            message: called with what is done next; `calibrating` with passes over the tokens done and in all,
                `progress` with bytes written and in all.
            about: further entries of the report, which decide nothing about the weights.
            evaluate: given the directory with the new model, before it has its final name, returns the last entries of
                the report.
            finish: given the same directory with the report in it, writes what is made from the report.

        Raises:
            LeanError: calibration text is missing or not read, or `out` is not empty.
        """
        check_free(out, self.source.directory)
        self.check_text(tokens is not None)
        # Beside `out`, to resume an interrupted calibration; it is removed at the end, or after a refusal.
        place, swept = Path(os.path.realpath(out)), self.to in SWEPT
        with unfinished(place, "calibration", "calibrating") if swept else nullcontext(place) as work:
            started = time.perf_counter()
            target, tensors, made, earlier = self._calibrate(tokens, work, calibrating, message)
            source = self.source.config
            report = {"to": self.to, "source": source.as_overrides(), "calibration_tokens": 0, **made}
            report |= sizes_of(source, target, getattr(self.options, "at_context", None))
            decided = {"report": dict(report), "tokens_sha256": None if tokens is None else tokens_hash(tokens)}
            report |= {"seconds": round(time.perf_counter() - started + earlier, 2), **(about or {})}

            def finish_directory(directory: Path) -> None:
                report.update(evaluate(directory))
                write_json(directory / REPORT, report)
                finish(directory)

            message("writing")
            write_model(
                self.source, out, target, tensors, dtype, settings=decided, finish=finish_directory, progress=progress
            )
        if swept:
            remove(work)
        return report

    def _calibrate(
        self, tokens: np.ndarray | None, work: Path, progress: Progress, message: Callable[[str], None]
    ) -> tuple[LeanConfig, Mapping[str, Tensor], dict[str, Any], float]:
        """The result with its part of the report, and the seconds that interrupted runs have spent on it."""
        if tokens is None:
            return *self._made, 0.0
        taken, options = {"calibration_tokens": tokens.size}, asdict(self.options)
        if not isinstance(self._made, Reduction):
            target, tensors, fits = self._made(tokens, progress=progress, message=message)
            return target, tensors, {**taken, "method": options.pop("method"), "settings": options, **fits}, 0.0
        job = {
            "to": self.to,
            "source": source_hashes(self.source),
            "tokens": tokens_hash(tokens),
            "versions": versions(),
        }
        sweeps = Sweeps(
            self.source.config,
            finite(self.source.tensors),
            tokens,
            work,
            [self._made],
            device=self._device,
            job={**job, **options},
            progress=progress,
            message=message,
        )
        (converted,) = sweeps.run()
        chosen = {name: options[name] for name in ("cache", "ratio") if name in options}
        fits = {**taken, **chosen, "layers": converted.layers}
        return converted.config, converted.tensors, fits, sweeps.earlier_seconds


def sizes_of(config: LeanConfig, target: LeanConfig, context: int | None = None) -> dict[str, Any]:
    """Return parameters and KV bytes, before and after: of a token while no window is full, and of a context."""
    configs = config, target
    sizes: dict[str, Any] = {
        "parameters": [count_parameters(config).total for config in configs],
        "kv_bytes_per_token_bf16": [config.plan.kv_bytes_per_token(torch.bfloat16) for config in configs],
    }
    if context is not None:
        sizes["at_context"] = context
        sizes["kv_bytes_at_context_bf16"] = [config.plan.kv_bytes(context, torch.bfloat16) for config in configs]
    return sizes
