"""SkipV1 from scratch against the baseline converted to SkipV1, at equal tokens in all.

Trains the baseline of a comparison for all but --share of its tokens with its own rate, converts it, and goes on
training for the rest, at each of --rates on the first seed and at the best of them on the others. Tokens that the
conversion is calibrated on count. As the control the baseline itself goes on for as many steps at that rate, since it
comes down further there than in the comparison. The result stands beside the comparison's own baseline and SkipV1, of
the same seeds. Everything is a `leanqkv` command whose output stays in --work; started again, it goes on. An --out that
is there keeps its rate and its seeds, so that seeds can be measured one after another, each on the machine of its runs.

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
from leanqkv.environment import hardware, place_of, same_place
from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.report.text import with_interval

TOKENS = 49_152  # of calibration
LIKE_THE_BASELINE = ("learning_rate", "min_learning_rate", "weight_decay")
# What the runs of a seed must agree in.
SAME = {
    "context length": lambda record: record["context_length"],
    "precision": lambda record: record["precision"]["choice"],
    "text": lambda record: record["data"]["sha256"],
    "held-out sequences": lambda record: record["batch_plan"]["evaluation_sequences"],
    "machine": lambda record: place_of(record["hardware"]),
}


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.comparison, self.share, self.data = load_comparison(options.comparison), options.share, options.data
        self.work, self.jobs = options.work or options.comparison / f"converted-{self.share:g}", options.jobs
        self.baseline = _result(self.comparison, self.comparison.baselines[0])
        self.skipv1 = _result(self.comparison, f"{self.baseline.name}+skipv1")
        self.earlier = harness.read_record(options.out) if options.out is not None and options.out.exists() else {}
        runs = sorted((options.comparison / "runs").glob("*-final-*/record.json"))
        records = [record for record in map(read_json, runs) if record["name"] == self.baseline.name]
        both = self.skipv1.losses.keys() & self.baseline.losses.keys()
        self.records = {record["seed"]: record for record in records if record["seed"] in both}
        self.seeds = self._seeds(options.seeds)
        self._check(options)
        self.work.mkdir(parents=True, exist_ok=True)

    def _seeds(self, asked: list[int] | None) -> list[int]:
        """Those of this machine that are finished in the comparison and not in the record."""
        known = {row["seed"] for row in self.earlier.get("rows", ())}
        here = {**hardware("cpu"), "threads": 1}
        fitting = {seed for seed, record in self.records.items() if same_place(record["hardware"], here)}
        if not (seeds := sorted(fitting & set(asked or fitting) - known)):
            names = f"{self.baseline.name} and SkipV1"
            raise LeanError(f"the comparison has no other seed with {names} finished on one thread of this CPU")
        return seeds

    def _check(self, options: argparse.Namespace) -> None:
        record = self.records[self.seeds[0]]
        if not 0 < options.share < 1 or self.steps(record)[1] < 1:
            raise LeanError(f"--share {options.share:g} leaves no uptraining behind {TOKENS:,} tokens of calibration")
        if record["recipe"]["schedule_steps"] is not None:
            raise LeanError("the comparison's schedule is not as long as its runs; that is not known how to shorten")
        common = self.common(record)
        if self.earlier and any(self.earlier.get(key) != value for key, value in common.items()):
            raise LeanError(f"{options.out} is of another comparison or share; choose another --out")

    def common(self, record: dict[str, Any]) -> dict[str, Any]:
        """What all seeds share."""
        names = {"model": self.baseline.name, "share": self.share, "tokens": record["tokens"]}
        return names | {"calibration_tokens": TOKENS, "data_sha256": record["data"]["sha256"]}

    def pretraining(self, seed: int) -> Command:
        """The baseline's run, but for the share of its steps that uptraining takes."""
        record = self.records[seed]
        recipe, steps = record["recipe"], self.steps(record)[0]
        rest = {
            "--seed": seed,
            "--steps": steps,
            "--warmup-steps": round(recipe["warmup_steps"] * steps / recipe["steps"]),
            "--evaluate-every": max(steps // 8, 1),
            **{f"--{name.replace('_', '-')}": recipe[name] for name in LIKE_THE_BASELINE},
        }
        return Command(
            self.work / f"baseline-{seed}", ("train", self.baseline.name, *_line(rest | self._common(record)))
        )

    def conversion(self, seed: int) -> Command:
        how = ("--to", "skipv1", "--calibration", self.data, "--tokens", TOKENS)
        return Command(self.work / f"skipv1-{seed}", ("convert", self.work / f"baseline-{seed}", *how))

    def uptraining(self, seed: int, rate: float) -> Command:
        return self._rest(self.conversion(seed), "uptrained", seed, rate)

    def control(self, seed: int, rate: float) -> Command:
        """The same for the baseline."""
        return self._rest(self.pretraining(seed), "control", seed, rate)

    def _rest(self, source: Command, name: str, seed: int, rate: float) -> Command:
        record = self.records[seed]
        steps = self.steps(record)[1]
        rest = {"--seed": 100 + seed, "--steps": steps, "--evaluate-every": steps, "--learning-rate": rate}
        line = ("uptrain", source.out, *_line(rest | self._common(record)))
        return Command(self.work / f"{name}-{seed}-{rate:g}", line)

    def steps(self, record: dict[str, Any]) -> tuple[int, int]:
        """Before and after the conversion; calibration takes some of the latter's tokens."""
        steps, tokens_per_step = record["recipe"]["steps"], record["tokens"] // record["recipe"]["steps"]
        after = round(self.share * steps)
        return steps - after, after - -(-TOKENS // tokens_per_step)

    def _common(self, record: dict[str, Any]) -> dict[str, Any]:
        return {
            "--batch-size": record["recipe"]["batch_size"],
            "--context-length": record["context_length"],
            "--precision": record["precision"]["choice"],
            "--evaluation-sequences": record["batch_plan"]["evaluation_sequences"],
            "--data": self.data,
            "--device": "cpu",
        }

    def run(self, rates: list[float]) -> dict[str, Any]:
        """Return the search and the rows of every seed, those of an earlier record too."""
        for make in (self.pretraining, self.conversion):
            run_commands(map(make, self.seeds), self.jobs)
        if not (search := self.earlier.get("search") or self.search(rates)):
            raise LeanError("uptraining diverged at every one of --rates; try smaller ones")
        best = min(search, key=lambda found: found["loss"])["learning_rate"]
        run_commands((make(seed, best) for seed in self.seeds for make in (self.uptraining, self.control)), self.jobs)
        rows = [*self.earlier.get("rows", ()), *(self.row(seed, best) for seed in self.seeds)]
        return {"search": search, "rows": sorted(rows, key=lambda row: row["seed"])}

    def search(self, rates: list[float]) -> list[dict[str, float]]:
        commands = {rate: self.uptraining(self.seeds[0], rate) for rate in rates}
        run_commands(commands.values(), self.jobs)
        found = [{"learning_rate": rate, "loss": _loss(command.record)} for rate, command in commands.items()]
        return [row for row in found if row["loss"] is not None]

    def row(self, seed: int, rate: float) -> dict[str, Any]:
        """The losses of a seed, on the same held-out sequences."""
        commands = (self.pretraining(seed), self.uptraining(seed, rate), self.control(seed, rate))
        before, after, control = (command.record for command in commands)
        for key, of in SAME.items():
            if len({of(record) for record in (before, after, control, self.records[seed])}) > 1:
                raise LeanError(f"the runs of seed {seed} in {self.work} differ in {key}; remove them and start again")
        return {
            "seed": seed,
            "tokens": before["tokens"] + TOKENS + after["tokens"],
            "source": _loss(before),
            "converted": after["evaluations"][0]["loss"],
            "uptrained": _loss(after),
            "control": _loss(control),
            "baseline": self.baseline.losses[seed],
            "skipv1": self.skipv1.losses[seed],
        }


def _result(comparison: ComparisonRecord, name: str) -> Result:
    for result in comparison.results:
        if result.name == name:
            return result
    raise LeanError(f"the comparison has no {name}")


def _loss(record: dict[str, Any]) -> float | None:
    """None of a run that diverged."""
    return None if record["final"] is None else record["final"]["validation_loss"]


def _line(options: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(part for option in options.items() for part in option)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if options.comparison is None:
        raise LeanError("name the directory of a comparison")
    bench = Bench(options)
    return bench.common(bench.records[bench.seeds[0]]) | bench.run(options.rates)


def losses(record: dict[str, Any], key: str) -> dict[int, float]:
    """Return a column of the rows by seed, without runs that diverged."""
    return {row["seed"]: row[key] for row in record["rows"] if row[key] is not None}


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    share = f"{record['share']:.0%}"
    names = {
        "source": f"the baseline after all but {share} of the tokens",
        "converted": "converted, before uptraining",
        "uptrained": f"converted and uptrained for the last {share}",
        "control": f"the baseline, trained for the last {share} in the same way",
        "skipv1": "SkipV1 from scratch",
    }

    def difference(first: str, second: str) -> str:
        return with_interval(paired_difference(losses(record, first), losses(record, second)))

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
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all that were finished on this machine")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time, one thread each")
    parser.add_argument("--work", type=Path, help="directory of the runs; default: one in the comparison's")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
