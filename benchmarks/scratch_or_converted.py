"""SkipV1 from scratch against the baseline converted to SkipV1, at equal tokens in all.

Trains the baseline of a comparison for all but --share of its tokens with its own rate, converts it, and goes on
training for the rest, at each of --rates on the first seed and at the best of them on the others. Tokens that the
conversion is calibrated on count. The result stands beside the comparison's own baseline and SkipV1, of the same seeds.
Everything is a `leanqkv` command whose output stays in --work; started again, it goes on. An --out that is there keeps
its rate and its seeds, so that seeds can be measured one after another, each on the machine of its runs.

    python benchmarks/scratch_or_converted.py runs/mine --out results/mine/scratch-or-converted.json
    python benchmarks/scratch_or_converted.py --tables results/mine/scratch-or-converted.json
"""

import argparse
from pathlib import Path
from typing import Any

import harness
from harness import Command, run_commands

from leanqkv.compare.records import ComparisonRecord, Result, load_comparison
from leanqkv.compare.statistics import paired_difference
from leanqkv.environment import place_of
from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.report.text import with_interval

TOKENS = 49_152  # of calibration


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.comparison, self.share, self.data = load_comparison(options.comparison), options.share, options.data
        self.work, self.jobs = options.work or options.comparison / "converted", options.jobs
        self.baseline = _result(self.comparison, self.comparison.baselines[0])
        self.skipv1 = _result(self.comparison, f"{self.baseline.name}+skipv1")
        self.earlier = read_json(options.out) if options.out is not None and options.out.exists() else {}
        known = {row["seed"] for row in self.earlier.get("rows", ())}
        finished = self.baseline.losses.keys() & self.skipv1.losses.keys()
        self.seeds = sorted(finished & set(options.seeds or finished) - known)
        if not self.seeds:
            raise LeanError(f"{options.comparison} has no other seed with {self.baseline.name} and SkipV1 finished")
        runs = options.comparison / "runs"
        self.records = [read_json(file) for file in sorted(runs.glob("*-final-*/record.json"))]
        self.work.mkdir(parents=True, exist_ok=True)

    def record_of(self, seed: int) -> dict[str, Any]:
        """The comparison's own run of the baseline."""
        return next(each for each in self.records if (each["name"], each["seed"]) == (self.baseline.name, seed))

    def pretraining(self, seed: int) -> Command:
        """The baseline's run, but for the share of its steps that uptraining takes."""
        record = self.record_of(seed)
        recipe, steps = record["recipe"], self.steps(record)[0]
        line = ("train", self.baseline.name, "--seed", seed, "--steps", steps, *self._common(record))
        rates = ("--learning-rate", recipe["learning_rate"], "--min-learning-rate", recipe["min_learning_rate"])
        return Command(self.work / f"baseline-{seed}", (*line, *rates, "--evaluate-every", max(steps // 8, 1)))

    def conversion(self, seed: int) -> Command:
        how = ("--to", "skipv1", "--calibration", self.data, "--tokens", TOKENS)
        return Command(self.work / f"skipv1-{seed}", ("convert", self.work / f"baseline-{seed}", *how))

    def uptraining(self, seed: int, rate: float) -> Command:
        record = self.record_of(seed)
        steps = self.steps(record)[1]
        line = ("uptrain", self.work / f"skipv1-{seed}", "--seed", 100 + seed, "--steps", steps)
        rest = ("--learning-rate", rate, "--evaluate-every", steps)
        return Command(self.work / f"uptrained-{seed}-{rate:g}", (*line, *self._common(record), *rest))

    def steps(self, record: dict[str, Any]) -> tuple[int, int]:
        """Before and after the conversion; calibration takes some of the latter's tokens."""
        steps, tokens_per_step = record["recipe"]["steps"], record["tokens"] // record["recipe"]["steps"]
        after = round(self.share * steps)
        return steps - after, after - -(-TOKENS // tokens_per_step)

    def _common(self, record: dict[str, Any]) -> tuple[Any, ...]:
        batch = ("--batch-size", record["recipe"]["batch_size"], "--precision", record["precision"]["choice"])
        sequences = record["batch_plan"]["evaluation_sequences"]
        return (*batch, "--evaluation-sequences", sequences, "--data", self.data, "--device", "cpu")

    def run(self, rates: list[float]) -> dict[str, Any]:
        """Return the search and the rows of every seed, those of an earlier record too."""
        for make in (self.pretraining, self.conversion):
            run_commands(map(make, self.seeds), self.jobs)
        search = self.earlier.get("search") or self.search(rates)
        best = min(search, key=lambda found: found["loss"])["learning_rate"]
        run_commands((self.uptraining(seed, best) for seed in self.seeds), self.jobs)
        rows = [*self.earlier.get("rows", ()), *(self.row(seed, best) for seed in self.seeds)]
        return {"search": search, "rows": sorted(rows, key=lambda row: row["seed"])}

    def search(self, rates: list[float]) -> list[dict[str, float]]:
        commands = {rate: self.uptraining(self.seeds[0], rate) for rate in rates}
        run_commands(commands.values(), self.jobs)
        return [{"learning_rate": rate, "loss": _loss(command.record)} for rate, command in commands.items()]

    def row(self, seed: int, rate: float) -> dict[str, Any]:
        """The losses of a seed, on the same held-out sequences."""
        before, after, whole = self.pretraining(seed).record, self.uptraining(seed, rate).record, self.record_of(seed)
        places = {place_of(record["hardware"]) for record in (before, after, whole)}
        if len(places) > 1:
            raise LeanError(f"seed {seed} was trained on several machines: {', '.join(sorted(places))}")
        return {
            "seed": seed,
            "tokens": before["tokens"] + TOKENS + after["tokens"],
            "source": _loss(before),
            "converted": after["evaluations"][0]["loss"],
            "uptrained": _loss(after),
            "baseline": self.baseline.losses[seed],
            "skipv1": self.skipv1.losses[seed],
        }


def _result(comparison: ComparisonRecord, name: str) -> Result:
    for result in comparison.results:
        if result.name == name:
            return result
    raise LeanError(f"the comparison has no {name}")


def _loss(record: dict[str, Any]) -> float:
    return record["final"]["validation_loss"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if options.comparison is None:
        raise LeanError("name the directory of a comparison")
    bench = Bench(options)
    record = bench.record_of(bench.seeds[0])
    found = bench.run(options.rates)
    common = {"model": bench.baseline.name, "share": options.share, "tokens": record["tokens"]}
    return common | {"calibration_tokens": TOKENS, "precision": record["precision"]["choice"]} | found


def losses(record: dict[str, Any], key: str) -> dict[int, float]:
    """Return a column of the rows by seed."""
    return {row["seed"]: row[key] for row in record["rows"]}


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    share = f"{record['share']:.0%}"
    names = {
        "source": f"the baseline after all but {share} of the tokens",
        "converted": "converted, before uptraining",
        "uptrained": f"converted and uptrained for the last {share}",
        "skipv1": "SkipV1 from scratch",
    }

    def difference(first: str, second: str) -> str:
        found = paired_difference(losses(record, first), losses(record, second))
        assert found is not None
        return with_interval(found)

    rows = [[name, difference(key, "baseline"), difference(key, "skipv1")] for key, name in names.items()]
    rows[-1][-1] = "–"
    return harness.table(("model", "difference to baseline, 95%", "to SkipV1 from scratch"), rows)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument(
        "comparison", type=Path, nargs="?", help="directory of a comparison with its baseline and SkipV1"
    )
    parser.add_argument("--data", default="stdlib", help="what it was trained on")
    parser.add_argument("--share", type=float, default=0.1, help="of the tokens that come after the conversion")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3], help="of uptraining")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all that are finished")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time, one thread each")
    parser.add_argument("--work", type=Path, help="directory of the runs; default: converted/ in the comparison's")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
