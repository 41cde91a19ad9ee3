"""What every benchmark shares: its command line, its record and its tables.

A benchmark is a file with a function that measures and a function `tables` that turns the record into the Markdown of
the documentation; `run` puts them together.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from leanqkv.data.batches import collate
from leanqkv.data.token_files import Tokens
from leanqkv.environment import record_header
from leanqkv.errors import LeanError
from leanqkv.evaluate.loss import batch_losses
from leanqkv.files import read_json, write_json
from leanqkv.report.text import markdown_table

Record = dict[str, Any]
# A process counts the memory of the one that started it as its own; this one is small.
LAUNCHER = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - started
peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
cost = {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_resident_bytes": peak}
print(json.dumps({"exit": os.waitstatus_to_exitcode(status), "cost": cost}))
"""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has: --out and --tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record to this JSON file")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print a record as Markdown, and measure nothing")
    return parser


def calibration_options(parser: argparse.ArgumentParser) -> None:
    """Add what a benchmark calibrates on: --calibration, --tokens and --length."""
    parser.add_argument("--calibration", default="prose", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=12_288, metavar="N", help="to calibrate on")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="of a sequence")


def sequence_losses(
    model: nn.Module,
    tokens: Tokens,
    starts: Sequence[int] | np.ndarray,
    context_length: int,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Return the mean cross-entropy in nats of each sequence, float64 [len(starts)], with dropout off.

    Every sequence is `context_length` targets, less those that only begin a text.
    """
    batches = (
        collate(tokens, starts[first : first + batch_size], context_length)
        for first in range(0, len(starts), batch_size)
    )
    losses, predicted = batch_losses(model, batches, autocast)
    return losses.sum(1) / predicted.sum(1)


def launched(
    command: Sequence[str], meanwhile: Callable[[subprocess.Popen[str]], None] = lambda launcher: None, **options: Any
) -> tuple[int, dict[str, float]]:
    """Run a command in a process of its own; return its exit code, and its wall and CPU time and peak resident memory.

    meanwhile: is called with the process whose only child runs the command. options: of `subprocess.Popen`.
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True, **options
    )
    meanwhile(launcher)
    outcome = json.loads(launcher.communicate()[0])
    return outcome["exit"], outcome["cost"]


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Record],
    tables: Callable[[Record], str],
) -> None:
    """Measure, print the tables and write the record to --out; with --tables print those of an earlier record.

    The record opens with `record_header`; its device is the option of that name, or the CPU.
    """
    options = parser.parse_args()
    try:
        if options.tables is not None:
            print(tables(read_record(options.tables)))
            return
        header = record_header("benchmark", Path(sys.argv[0]).stem, getattr(options, "device", "cpu"))
        record = header | measure(options)
    except LeanError as error:
        parser.exit(2, f"error: {error}\n")
    print(tables(record))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, record)


def read_record(file: Path) -> Record:
    """Return the record of an earlier start of this benchmark.

    Raises:
        LeanError: not readable, or of something else.
    """
    record, name = read_json(file), Path(sys.argv[0]).stem
    if record.get("name", name) != name or "kind" not in record:
        raise LeanError(f"{file} is no record of this benchmark; choose another file")
    return record


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def spread_text(values: dict[str, float], digits: int = 2) -> str:
    """Return a `spread` as a table shows it, `1.02 (0.98–1.10)`."""
    middle, low, high = (f"{values[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{middle} ({low}–{high})"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str | None = None) -> str:
    """Return a Markdown table without the last line break; `align` as in `markdown_table`."""
    return markdown_table(headers, rows, align).rstrip("\n")


@dataclass(frozen=True)
class Command:
    """A command line of `leanqkv` and the directory that it makes."""

    out: Path
    arguments: tuple[Any, ...] = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether the directory is finished."""
        return any((self.out / name).exists() for name in ("record.json", "conversion.json"))

    @property
    def record(self) -> Record:
        """What a run of training wrote."""
        return read_json(self.out / "record.json")


def run_commands(commands: Iterable[Command], at_once: int) -> None:
    """Run those that are not done yet, each in one thread, `at_once` at a time; a log lies beside each directory.

    A run of training that diverges is done, too.

    Raises:
        LeanError: a command failed.
    """

    def run_one(command: Command) -> int:
        print(command.out.name, file=sys.stderr, flush=True)
        command.out.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{command.out}.log").open("w") as log:
            line = [sys.executable, "-m", "leanqkv.cli", *map(str, command.arguments), "--out", str(command.out)]
            return subprocess.run(line, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode

    waiting = [command for command in commands if not command.done]
    with ThreadPoolExecutor(at_once) as pool:
        for command, code in zip(waiting, pool.map(run_one, waiting), strict=True):
            if code and not command.done:
                raise LeanError(f"{command.out.name} failed; see {command.out}.log")
