"""A converted checkpoint distilled from its source: learning rates searched, what is trained, and the loss on the way.

Short runs with every learning rate, of the changed weights alone and of all of them, and with a higher temperature at
the best of these; then one long run with the settings that are left with the least divergence on the first text. One
rate and one temperature alone are not searched. Only the divergence from the source is minimized, never the loss of the
text. Runs and scores stay in --work, and are not repeated.

    python benchmarks/distill.py MODEL.gguf CONVERTED --evaluate prose book.txt --out results/real/distillation.json
    python benchmarks/distill.py --tables results/real/distillation.json
"""

import argparse
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import harness
import torch

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.data.evaluation import EvaluationText, evaluation_text, unseen_split
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import paired_record, spread_windows
from leanqkv.files import make_directory, read_json, write_json
from leanqkv.report.text import signed

OF_A_CONVERSION = ("to", "ratio", "cache", "calibration_tokens", "calibration", "kv_bytes_per_token_bf16")


@dataclass(frozen=True)
class Settings:
    """What is searched."""

    only_changed: bool
    learning_rate: float
    temperature: float = 1.0

    @property
    def name(self) -> str:
        return f"{'changed' if self.only_changed else 'all'}-{self.learning_rate:g}-{self.temperature:g}"


class Bench:
    """Runs of one converted checkpoint, and their scores."""

    def __init__(self, options: argparse.Namespace):
        self.source, self.converted, self.work = options.source, options.converted, options.work
        self.data, self.names, self.evaluated_tokens = options.data, options.evaluate, options.evaluate_tokens
        self.length, self.batch, self.precision = options.sequence_length, options.batch_size, options.precision
        make_directory(self.work)

    @cached_property
    def teacher(self) -> Any:
        """The source in float32."""
        return load_model(open_causal_lm(self.source), torch.float32)

    @cached_property
    def texts(self) -> list[EvaluationText]:
        """The evaluation texts; of one that is trained on, the part that is not."""
        return [
            evaluation_text(
                name, tokenizer=self.source, vocab_size=self.vocab_size, split=unseen_split(name, self.data)
            )
            for name in self.names
        ]

    @cached_property
    def vocab_size(self) -> int:
        return open_causal_lm(self.source).config.vocab_size

    def run(self, settings: Settings, steps: int, every: int) -> dict[str, Any]:
        """Distill with these settings; return what the run's record says of its cost, and where its checkpoints lie."""
        out = self.work / f"{settings.name}-{steps}"
        if not (out / "record.json").exists():
            what = ("--only-changed",) if settings.only_changed else ()
            uptrain(
                *(self.converted, "--teacher", self.source, *what, "--distillation", 1, "--weight-decay", 0),
                *("--distillation-temperature", settings.temperature, "--learning-rate", settings.learning_rate),
                *("--data", self.data, "--steps", steps, "--batch-size", self.batch, "--micro-batch-size", self.batch),
                *("--context-length", self.length, "--precision", self.precision, "--evaluation-sequences", 8),
                *("--evaluate-every", every, "--keep-checkpoints", "--out", out),
            )
        record = read_json(out / "record.json")
        cost = {key: record[key] for key in ("tokens", "seconds", "tokens_per_second", "precision")}
        return {"settings": asdict(settings), "steps": steps, **cost, "training": record["training"], "out": str(out)}

    def score(self, directory: Path, texts: int) -> list[dict[str, Any]]:
        """Compare a checkpoint with the source on the first `texts` evaluation texts."""
        file = self.work / f"{directory.parent.name}-{directory.name}-{texts}.scores.json"
        if not file.exists():
            model = load_model(open_causal_lm(directory), torch.float32)
            scores = []
            for text in self.texts[:texts]:
                windows = spread_windows(len(text.tokens), self.length, max(1, self.evaluated_tokens // self.length))
                scores.append(paired_record(self.teacher, model, text, windows, self.length))
            write_json(file, {"scores": scores})
        return read_json(file)["scores"]

    def short(self, settings: Settings, steps: int) -> dict[str, Any]:
        """Run for a few steps, and score the end on the first text."""
        row = self.run(settings, steps, steps)
        return {**row, "evaluation": self.score(Path(row.pop("out")), 1)[0]}

    def long(self, settings: Settings, steps: int, points: int) -> dict[str, Any]:
        """Run for many steps, and score the start and every checkpoint on every text."""
        every = steps // points
        row = self.run(settings, steps, every)
        out = Path(row.pop("out"))
        ends = {step: out / f"checkpoint-{step}" for step in range(every, steps, every)}
        ends = {0: self.converted, **ends, steps: out}
        tokens = self.batch * self.length
        curve = [
            {"tokens": step * tokens, "evaluations": self.score(directory, len(self.texts))}
            for step, directory in ends.items()
        ]
        return {**row, "curve": curve}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Search the settings, then distill with the best ones."""
    if options.source is None or options.converted is None:
        raise LeanError("give the source and the converted checkpoint")
    bench = Bench(options)
    grid = [Settings(True, rate) for rate in options.rates_changed] + [Settings(False, rate) for rate in options.rates]
    if len(grid) == 1 and len(options.temperatures) == 1:
        search, chosen = [], replace(grid[0], temperature=options.temperatures[0])
    else:
        search = [bench.short(settings, options.search_steps) for settings in grid]
        for temperature in options.temperatures:
            hotter = replace(best(search), temperature=temperature)
            search.append(bench.short(hotter, options.search_steps))
        chosen = best(search)
    final = bench.long(chosen, options.steps, options.points)
    conversion = read_json(options.converted / "conversion.json")
    return {
        "source": options.source.name,
        "conversion": {key: conversion[key] for key in OF_A_CONVERSION if key in conversion},
        "data": options.data,
        "sequence_length": options.sequence_length,
        "batch_size": options.batch_size,
        "search": search,
        "final": final,
    }


def uptrain(*arguments: Any) -> None:
    """Run `leanqkv uptrain` in its own process."""
    command = [sys.executable, "-m", "leanqkv", "uptrain", *map(str, arguments)]
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        raise LeanError(f"leanqkv uptrain failed with exit code {code}")


def best(rows: list[dict[str, Any]]) -> Settings:
    """Return the settings whose run ends nearest to the source."""
    return Settings(**min(rows, key=lambda row: row["evaluation"]["divergence"]["mean"])["settings"])


def tables(record: dict[str, Any]) -> str:
    """Return the search and the curve as Markdown."""
    search = [search_table(record)] if record["search"] else []
    return "\n\n".join([*search, curve_table(record)])


def search_table(record: dict[str, Any]) -> str:
    """Return every short run with what is left at its end."""
    headers = ("trained", "learning rate", "temperature", "tokens", "loss against the source", "KL, nats", "tokens/s")
    rows = []
    for row in record["search"]:
        settings, found = row["settings"], row["evaluation"]
        rows.append(
            (
                "changed weights" if settings["only_changed"] else "all weights",
                f"{settings['learning_rate']:g}",
                f"{settings['temperature']:g}",
                f"{row['tokens']:,}",
                difference(found["loss_difference"]),
                f"{found['divergence']['mean']:.4f}",
                f"{row['tokens_per_second'] or math.nan:,.0f}",
            )
        )
    return harness.table(headers, rows, "l" + "r" * 6)


def curve_table(record: dict[str, Any]) -> str:
    """Return the loss and the divergence of the long run on the way, on every text."""
    curve = record["final"]["curve"]
    headers = ["tokens"]
    for found in curve[0]["evaluations"]:
        text = found["text"]["description"]
        headers += [f"{text}: loss against the source", "KL, nats"]
    rows = [
        [
            f"{point['tokens']:,}",
            *(
                cell
                for found in point["evaluations"]
                for cell in (difference(found["loss_difference"]), f"{found['divergence']['mean']:.4f}")
            ),
        ]
        for point in curve
    ]
    return harness.table(headers, rows, "r" * len(headers))


def difference(found: dict[str, float]) -> str:
    """Return a difference of losses with half of its 95% interval."""
    return f"{signed(found['mean'], 4)} ± {found['half_width']:.4f}"


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help="what was converted: the teacher")
    parser.add_argument("converted", type=Path, nargs="?", metavar="CONVERTED", help="directory of `leanqkv convert`")
    parser.add_argument("--data", default="prose", metavar="TEXT", help="to distill on")
    parser.add_argument("--evaluate", nargs="+", metavar="TEXT", default=["prose"], help="the first chooses settings")
    parser.add_argument("--evaluate-tokens", type=int, default=8192, metavar="N", help="of every text")
    parser.add_argument("--rates", type=float, nargs="*", default=[3e-5, 1e-4, 3e-4], help="with all weights trained")
    parser.add_argument("--rates-changed", type=float, nargs="*", default=[1e-4, 3e-4, 1e-3], help="with those changed")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[2.0], help="at the best learning rate")
    parser.add_argument("--search-steps", type=int, default=30, help="of each short run")
    parser.add_argument("--steps", type=int, default=480, help="of the long run")
    parser.add_argument("--points", type=int, default=6, help="checkpoints of the long run that are scored")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step")
    parser.add_argument("--sequence-length", type=int, default=512, metavar="N")
    parser.add_argument("--precision", default="bf16+sdpa", help="as leanqkv uptrain takes it")
    parser.add_argument("--work", type=Path, default=Path("runs/real/distillation"), help="for the runs")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
