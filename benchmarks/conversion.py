"""Conversion and uptraining measured: losses right after every conversion, and loss against uptraining tokens.

Trains a baseline and a from-scratch SkipV1 per seed, converts the baselines in every way, and goes on training the
calibrated ones (also with their sources as teachers), the mean-v ones and, as the control, the baselines themselves for
shares of the pretraining tokens (P3, Fig. 8 and 10). Everything is a `leanqkv` command whose output stays in --work;
started again, it goes on.

    python benchmarks/conversion.py --name stdlib --work runs/conversion/stdlib --out results/conversion
    python benchmarks/conversion.py --name torch-headers --data torch-headers --seeds 2 \\
        --rates results/conversion/stdlib.json
    python benchmarks/conversion.py --tables results/conversion/stdlib.json
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Command, run_commands, sequence_losses

from leanqkv import LeanForCausalLM, cache_bytes
from leanqkv.compare.statistics import paired_difference
from leanqkv.data.prepare import prepare_data
from leanqkv.environment import made_on
from leanqkv.errors import LeanError
from leanqkv.files import RECORD_FORMAT, read_json, write_json
from leanqkv.train.precision import parse_precision

MODEL, BATCH, LENGTH, PRECISION = "small", 16, 256, "bf16+compile+eager"
# The cosine ends an eighth before the run does: a loss that still falls then is not an effect of the rate's decay.
SCHEDULE = 7 / 8
PRETRAINING = ("--batch-size", BATCH, "--micro-batch-size", 8, "--learning-rate", 2e-3, "--min-learning-rate", 2e-5)
EVALUATION = ("--evaluation-sequences", 512)
WEIGHTS_ALONE = ("mean-v", "mean-vo", "top-v", "top-vo", "svd")
# Calibration tokens, and the other amounts whose effect is shown, on the first seed, as is that of every freedom.
TOKENS, AMOUNTS = 49_152, (24_576, 98_304)
FREEDOMS = {
    "W_O": ("--no-choose", "--no-refit-lent", "--no-refit-values"),
    "W_O, heads chosen": ("--no-refit-lent", "--no-refit-values"),
    "W_O, heads chosen, W_V": ("--no-refit-lent",),
}
SHARES = (0.01, 0.04, 0.08)
ARMS = ("calibrated", "calibrated, teacher", "mean-v", "baseline")
# Where rates are searched, on the first seed, and for which shares the best is then used. A finished model that is
# nearly right wants lower ones than one that has lost a nat or one that is shown the distribution it lacks.
SEARCHED = {0.01: (0.01,), 0.04: (0.04, 0.08)}
RATES = {
    "calibrated": (1e-5, 3e-5, 1e-4, 3e-4),
    "calibrated, teacher": (3e-5, 1e-4, 3e-4, 1e-3),
    "mean-v": (1e-4, 3e-4, 8e-4, 2e-3),
    "baseline": (1e-5, 3e-5, 1e-4, 3e-4),
}
GROUPED = "num_key_value_heads=2"  # of 4 heads
LEVELLED = 0.01


class Bench:
    def __init__(self, asked: argparse.Namespace):
        self.work, self.steps, self.jobs, self.seeds = asked.work, asked.steps, asked.jobs, range(asked.seeds)
        self.data = headers() if asked.data == "torch-headers" else asked.data

    @property
    def tokens(self) -> int:
        return self.steps * BATCH * LENGTH

    # --- commands -----------------------------------------------------------------------------------------------------

    def run(self, jobs: Iterable[Command]) -> None:
        run_commands(jobs, self.jobs)

    def text(self, option: str) -> tuple[Any, ...]:
        return () if self.data is None else (option, self.data)

    def pretraining(self, changes: str, seed: int) -> Command:
        length = ("--steps", self.steps, "--schedule-steps", round(SCHEDULE * self.steps))
        rest = ("--evaluate-every", self.steps // 10, "--precision", PRECISION, *EVALUATION, *self.text("--data"))
        out = self.work / f"{changes or 'baseline'}-{seed}"
        name = f"{MODEL}+{changes}" if changes else MODEL
        return Command(out, ("train", name, "--seed", seed, *length, *PRETRAINING, *rest))

    def conversion(self, seed: int, method: str, *options: Any, name: str = "", source: str = "baseline") -> Command:
        how: tuple[Any, ...] = ("--to", "skipv1", "--method", method, *options)
        if method == "calibrated":
            tokens = () if "--tokens" in options else ("--tokens", TOKENS)
            how = (*how, *tokens, "--calibration", self.data or "stdlib")
        return Command(self.work / f"{name or method}-{seed}", ("convert", self.work / f"{source}-{seed}", *how))

    def uptraining(self, seed: int, arm: str, share: float, rate: float) -> Command:
        """Calibration tokens count as uptraining tokens."""
        start = arm.removesuffix(", teacher")
        steps = round((share * self.tokens - (TOKENS if start == "calibrated" else 0)) / (BATCH * LENGTH))
        teacher = ("--teacher", self.work / f"baseline-{seed}") if start != arm else ()
        recipe = ("--seed", 100 + seed, "--steps", steps, "--learning-rate", rate, "--batch-size", BATCH)
        rest = ("--micro-batch-size", 8, "--evaluate-every", steps, "--precision", PRECISION)
        out = self.work / f"up-{arm.replace(', ', '-')}-{share:g}-{rate:g}-{seed}"
        source = self.work / f"{start}-{seed}"
        return Command(out, ("uptrain", source, *recipe, *rest, *EVALUATION, *self.text("--data"), *teacher))

    # --- what is measured ---------------------------------------------------------------------------------------------

    def measured(self, job: Command, seed: int, of: str = "baseline") -> dict[str, Any]:
        """A conversion's loss, on the sequences and in the arithmetic of its source's own validation, and its cache."""
        file = Path(f"{job.out}.measured.json")
        if not file.exists():
            source = self.work / f"{of}-{seed}"
            model = LeanForCausalLM.from_pretrained(job.out).eval()
            data = prepare_data(self.data, vocab_size=model.config.vocab_size, tokenizer=str(source))
            starts = np.load(next((source / "batches").glob("*evaluation.npy")))
            precision = parse_precision("bf16+eager")
            assert precision is not None
            precision.apply(model)
            losses = sequence_losses(model, data.validation(), starts, LENGTH, 8, lambda: precision.autocast("cpu"))
            with torch.no_grad():
                held = model(torch.zeros(1, LENGTH, dtype=torch.long), use_cache=True).past_key_values
            write_json(file, {"loss": float(losses.mean()), "cache_bytes_per_token": cache_bytes(held) / LENGTH})
        conversion = read_json(job.out / "conversion.json")
        kept = {key: conversion[key] for key in ("calibration_tokens", "seconds") if key in conversion}
        return {"seed": seed, "name": job.out.name.removesuffix(f"-{seed}"), **kept, **read_json(file)}

    def measure(self, jobs: list[tuple[int, Command]]) -> list[dict[str, Any]]:
        self.run(job for _, job in jobs)
        # One after the other: transformers' `from_pretrained` is not made for several threads.
        return [self.measured(job, seed) for seed, job in jobs]

    # --- phases -------------------------------------------------------------------------------------------------------

    def pretrain(self, changes: str) -> dict[str, Any]:
        jobs = {seed: self.pretraining(changes, seed) for seed in self.seeds}
        self.run(jobs.values())
        records = {seed: job.record for seed, job in jobs.items()}
        return {
            "tokens": self.tokens,
            "parameters": records[0]["parameters"],
            "kv_bytes_per_token": records[0]["kv_bytes_per_token"],
            "recipe": records[0]["recipe"],
            "data": records[0]["data"],
            "loss": {seed: record["final"]["validation_loss"] for seed, record in records.items()},
            "evaluations": {seed: record["evaluations"] for seed, record in records.items()},
            "last_tenth": {seed: _gained(record["evaluations"]) for seed, record in records.items()},
            "tokens_per_second": {seed: record["tokens_per_second"] for seed, record in records.items()},
        }

    def convert(self) -> list[dict[str, Any]]:
        jobs = [(s, self.conversion(s, method)) for s in self.seeds for method in (*WEIGHTS_ALONE, "calibrated")]
        return self.measure(jobs)

    def more_conversions(self) -> list[dict[str, Any]]:
        jobs = []
        for ratio, method in itertools.product((0.25, 0.75), ("mean-v", "calibrated")):
            jobs.append(self.conversion(0, method, "--ratio", ratio, name=f"{method}, ratio {ratio:g}"))
        for amount in AMOUNTS:
            jobs.append(self.conversion(0, "calibrated", "--tokens", amount, name=f"calibrated, {amount} tokens"))
        for freedom, options in FREEDOMS.items():
            jobs.append(self.conversion(0, "calibrated", *options, name=f"{freedom} alone"))
        return self.measure([(0, job) for job in jobs])

    def grouped(self) -> dict[str, Any]:
        """A source of grouped-query attention, on the first seed."""
        source = self.pretraining(GROUPED, 0)
        jobs = [self.conversion(0, how, name=f"{how}, {GROUPED}", source=GROUPED) for how in ("mean-v", "calibrated")]
        self.run([source])
        self.run(jobs)
        evaluations = source.record["evaluations"]
        return {
            "change": GROUPED,
            "loss": source.loss,
            "kv_bytes_per_token": source.record["kv_bytes_per_token"],
            "last_tenth": _gained(evaluations),
            "conversions": [self.measured(job, 0, of=GROUPED) for job in jobs],
        }

    def search(self) -> list[dict[str, Any]]:
        """Every arm's loss by rate, on the first seed."""
        grid = [(arm, share, rate) for arm in ARMS for share in SEARCHED for rate in RATES[arm]]
        jobs = [self.uptraining(0, *at) for at in grid]
        self.run(jobs)
        names = ("arm", "share", "learning_rate")
        return [{**dict(zip(names, at, strict=True)), "loss": _loss(job)} for at, job in zip(grid, jobs, strict=True)]

    def uptrain(self, searched: list[dict[str, Any]]) -> list[dict[str, Any]]:
        def rate(arm: str, share: float) -> float:
            at = next(at for at, shares in SEARCHED.items() if share in shares)
            rows = [row for row in searched if (row["arm"], row["share"]) == (arm, at)]
            return min(rows, key=lambda row: row["loss"])["learning_rate"]

        points = itertools.product(ARMS, SHARES)
        jobs = {(*p, rate(*p), s): self.uptraining(s, *p, rate(*p)) for p in points for s in self.seeds}
        self.run(jobs.values())
        return [
            {
                "arm": arm,
                "share": share,
                "seed": seed,
                "learning_rate": chosen,
                "steps": job.record["recipe"]["steps"],
                "before": job.record["evaluations"][0]["loss"],
                "loss": _loss(job),
            }
            for (arm, share, chosen, seed), job in jobs.items()
        ]


def _loss(job: Command) -> float:
    return job.record["final"]["validation_loss"]


def _gained(evaluations: list[dict[str, float]]) -> float:
    """What the last tenth of the steps took off the loss."""
    return evaluations[-2]["loss"] - evaluations[-1]["loss"]


def headers() -> str:
    """The C++ headers that come with torch."""
    return str(Path(torch.__file__).parent / "include")


def tables(record: dict[str, Any]) -> str:
    """What the record has so far, as Markdown."""
    base = _by_seed(record["baseline"]["loss"])
    lines = ["| conversion | calibration tokens | loss right after | lost against the source |"]
    lines.append("| --- | ---: | ---: | ---: |")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in (*record["conversions"], *record.get("more_conversions", ())):
        rows.setdefault(row["name"], []).append(row)
    for name, of in rows.items():
        losses = {row["seed"]: row["loss"] for row in of}
        mean, tokens = statistics.mean(losses.values()), of[0]["calibration_tokens"]
        tokens = f"{tokens:,}" if tokens else "–"
        lines.append(f"| {name} | {tokens} | {mean:.4f} | {_difference(losses, base)} |")
    for row in record["grouped"]["conversions"] if "grouped" in record else ():
        tokens, lost = row["calibration_tokens"], row["loss"] - record["grouped"]["loss"]
        lines.append(f"| {row['name']} | {f'{tokens:,}' if tokens else '–'} | {row['loss']:.4f} | {lost:+.4f} |")
    if "uptraining" in record:
        lines += ["", "| start | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |"]
        lines.append("| --- |" + " ---: |" * len(SHARES))
    for arm in ARMS if "uptraining" in record else ():
        cells = []
        for share in SHARES:
            losses = {r["seed"]: r["loss"] for r in record["uptraining"] if (r["arm"], r["share"]) == (arm, share)}
            cells.append(_difference(losses, base))
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    told = [f"Baseline: {statistics.mean(base.values()):.4f}."]
    if "skipv1" in record:
        told.append(f"SkipV1 from scratch: {_difference(_by_seed(record['skipv1']['loss']), base)}.")
    return "\n".join((*lines, "", " ".join(told)))


def _by_seed(losses: dict[Any, float]) -> dict[int, float]:
    """JSON has made strings of the seeds."""
    return {int(seed): loss for seed, loss in losses.items()}


def _difference(losses: dict[int, float], base: dict[int, float]) -> str:
    found = paired_difference(losses, base)
    assert found is not None
    spread = "" if found.interval is None else f" ± {(found.interval[1] - found.interval[0]) / 2:.4f}"
    return f"{found.mean:+.4f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="print a record as Markdown, and do nothing else")
    parser.add_argument("--name", default="stdlib", help="of the record")
    parser.add_argument("--data", help="as leanqkv train takes it; or torch-headers, the C++ headers in torch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=Path, help="a record whose rates are taken; ratios and freedoms are left out")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time, one thread each")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/conversion"))
    asked = parser.parse_args()
    if asked.tables is not None:
        print(tables(read_json(asked.tables)))
        return
    asked.work = asked.work or Path("runs/conversion") / asked.name
    asked.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(asked)
    record: dict[str, Any] = {"record": RECORD_FORMAT, "name": asked.name, "model": MODEL, "precision": PRECISION}
    record |= made_on("cpu")
    asked.out.mkdir(parents=True, exist_ok=True)
    phases: dict[str, Callable[[], Any]] = {"baseline": lambda: bench.pretrain(""), "conversions": bench.convert}
    if asked.rates is None:
        phases |= {"more_conversions": bench.more_conversions, "grouped": bench.grouped, "search": bench.search}
        phases["uptraining"] = lambda: bench.uptrain(record["search"])
    else:
        record["rates"] = asked.rates.stem
        phases["uptraining"] = lambda: bench.uptrain(read_json(asked.rates)["search"])
    phases["skipv1"] = lambda: bench.pretrain("skipv1")
    for name, phase in phases.items():
        record[name] = phase()
        write_json(asked.out / f"{asked.name}.json", record)
        for seed, gained in record["baseline"]["last_tenth"].items() if name == "baseline" else ():
            print(f"seed {seed}: the last tenth gained {gained:.4f}, {'' if gained < LEVELLED else 'not '}levelled")
    print(tables(record))


if __name__ == "__main__":
    try:
        main()
    except LeanError as error:
        sys.exit(f"error: {error}")
