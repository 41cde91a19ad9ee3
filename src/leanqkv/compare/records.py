"""The records of a comparison as they lie in its directory: its plan, and a run per architecture and seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from ..environment import place_of, same_place
from ..errors import LeanError
from ..files import RECORD_FORMAT
from ..records import COMPARISON, RECORD, TASKS, Misfit, check_shape, read_record, reading
from .measure import LOSS, Measure, measure_of
from .statistics import Curve, PairedDifference, paired_difference

AGAIN = "remove it and run the comparison again"


@dataclass(frozen=True)
class Run:
    """One record: what was trained, how, on what, and the outcome. Other fields are as in record.json.

    Attributes:
        final: outcomes at the end by name; empty while it runs and where it diverged.
        curves: outcomes during training, by name.
        diverged: step and reason, where it did.
        tasks: accuracy on downstream tasks, where they were scored.
    """

    role: str
    name: str
    seed: int
    recipe: Mapping[str, Any]
    context_length: int
    parameters: Mapping[str, int]
    kv_bytes_per_token: Mapping[str, int]
    data: Mapping[str, Any]
    batch_plan: Mapping[str, Any]
    precision: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    git_commit: str | None
    tokens: int
    tokens_per_second: float | None
    seconds: float
    final: Mapping[str, float]
    curves: Mapping[str, Curve]
    diverged: tuple[int, str] | None
    tasks: Mapping[str, float] = field(default_factory=dict)

    @property
    def measure(self) -> Measure:
        return measure_of(self.data, self.batch_plan)

    @property
    def kv_bytes(self) -> int:
        """The bytes that the cache takes for a token in bfloat16."""
        return self.kv_bytes_per_token["bfloat16"]

    @property
    def learning_rate(self) -> float:
        return self.recipe["learning_rate"]

    @property
    def loss(self) -> float | None:
        """At the end; None while it runs and where it diverged."""
        return self.final.get("validation_loss")

    @property
    def score(self) -> float | None:
        """The measure at the end."""
        return self.final.get(self.measure.final)

    @property
    def scores(self) -> Curve:
        """The measure during training, by step."""
        return self.curves[self.measure.evaluation]

    @property
    def state(self) -> str:
        """`finished`, `diverged` or `missing`; a run that is still training is missing too."""
        return "diverged" if self.diverged else "missing" if self.loss is None else "finished"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Run":
        """Read a record.json.

        Raises:
            Misfit: not a record of this version.
        """
        if record.get("record") != RECORD_FORMAT:
            version = shorten(repr(record.get("record")), 80)
            raise Misfit(f" cannot be read: record version {version}, this leanqkv reads version {RECORD_FORMAT}")
        check_shape(record, RECORD)
        final, stop = record["final"] or {}, record["diverged"]
        diverged = None if stop is None else (int(stop["step"]), str(stop["reason"]))
        loss = None if diverged else final.get("validation_loss")
        if loss is not None and not math.isfinite(loss):
            loss, diverged = None, (int(record["recipe"]["steps"]), f"validation loss {loss}")
        measure = measure_of(record["data"], record["batch_plan"])
        check_shape(record["data"], measure.data, "data")
        outcome: dict[str, Any] = {
            "final": {} if loss is None else {name: float(value) for name, value in final.items()},
            "curves": {name: _curve(record["evaluations"], name) for name in ("loss", measure.evaluation)},
            "diverged": diverged,
            "tasks": {},
        }
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name not in outcome}, **outcome)


def _curve(evaluations: Sequence[Mapping[str, Any]], name: str) -> Curve:
    values = {int(at["step"]): at[name] for at in evaluations}
    return {step: float(x) for step, x in values.items() if x is not None and math.isfinite(x)}


@dataclass(frozen=True)
class Result:
    """The runs of one architecture; `finals` holds them by seed, those that did not finish included."""

    name: str
    style: int
    finals: Mapping[int, Run]
    any_run: Run | None  # for what all its runs share: sizes
    learning_rate: float | None
    baseline: "Result | None"  # None for a baseline

    @cached_property
    def difference(self) -> PairedDifference | None:
        """To the baseline, over the seeds that both have; None for a baseline."""
        return None if self.baseline is None else paired_difference(self.scores, self.baseline.scores)

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run.loss for seed, run in self.finals.items() if run.loss is not None}

    @property
    def scores(self) -> dict[int, float]:
        """The measure at the end, by seed."""
        return {seed: run.score for seed, run in self.finals.items() if run.score is not None}

    @property
    def kv_bytes(self) -> int | None:
        return self.any_run.kv_bytes if self.any_run else None

    @property
    def mean_loss(self) -> float:
        return float(np.mean(list(self.losses.values())))

    @property
    def verdict(self) -> str:
        """`lower`, `higher` (clearly), `unclear`, `one seed` or `none`."""
        if self.difference is None:
            return "none"
        if self.difference.half_width is None:
            return "one seed"
        if not self.difference.clear:
            return "unclear"
        return "lower" if self.difference.mean < 0 else "higher"

    def state(self, seed: int) -> str:
        """`finished`, `diverged` or `missing`."""
        return self.finals[seed].state if seed in self.finals else "missing"

    def curves(self) -> dict[int, Curve]:
        """Return the measure during training, by seed, of the runs that did not diverge."""
        return {seed: run.scores for seed, run in self.finals.items() if run.diverged is None}


@dataclass(frozen=True)
class ComparisonRecord:
    """A comparison as far as it has come: its plan, and the records of its runs.

    Attributes:
        groups: architectures, in each group the baseline of the others first.
        rows: by architecture, the line of the papers' tables that it stands for.
        recipe: recipe fields that replaced every architecture's own.
        base: of a suite, what its models are built on in place of its own base.
        grid: `seed` and `learning_rates` that each architecture was tried with before the final runs; `steps`, if those
            runs were shorter.
        uptrained: by architecture, the share of the steps for which those train that continue their baseline.
    """

    title: str
    suite: str | None
    scale: str | None
    command: str
    groups: Sequence[Sequence[str]]
    rows: Mapping[str, str]
    recipe: Mapping[str, Any]
    seeds: Sequence[int]
    grid: Mapping[str, Any] | None
    notes: Sequence[str]
    chosen_learning_rate: Mapping[str, float] = field(default_factory=dict)  # empty until the search is done
    runs: Sequence[Run] = field(default=(), repr=False)
    base: str | None = None
    uptrained: Mapping[str, float] = field(default_factory=dict)

    @property
    def from_scratch(self) -> list[list[Result]]:
        """The results of each group, without those of uptrained architectures."""
        return [[result for result in group if result.name not in self.uptrained] for group in self.result_groups]

    @property
    def compared_losses(self) -> list[tuple[Result, dict[int, Curve], dict[int, Curve]]]:
        """Each result from scratch, its losses during training and its baseline's; of an accuracy there are none."""
        whole = [result for group in self.from_scratch for result in group if self.measure.is_loss]
        return [(one, one.curves(), one.baseline.curves()) for one in whole if one.baseline]

    @property
    def measure(self) -> Measure:
        return self.runs[0].measure if self.runs else LOSS

    @property
    def architectures(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def baselines(self) -> list[str]:
        return [group[0] for group in self.groups]

    @cached_property
    def result_groups(self) -> list[list[Result]]:
        """In each group one result per architecture, the baseline's first."""
        groups = []
        for first, *others in self.groups:
            baseline = self._result(first, None)
            groups.append([baseline, *(self._result(name, baseline) for name in others)])
        return groups

    @property
    def results(self) -> list[Result]:
        """Those of all groups, one after another."""
        return [result for group in self.result_groups for result in group]

    def _result(self, name: str, baseline: Result | None) -> Result:
        runs = [run for run in self.runs if run.name == name]
        finals = {run.seed: run for run in runs if run.role == "final"}
        rate = next((run.learning_rate for run in finals.values()), self.chosen_learning_rate.get(name))
        return Result(name, self.architectures.index(name), finals, runs[0] if runs else None, rate, baseline)

    def asks_for(self, run: Run) -> bool:
        """Whether a run is part of this comparison; its directory may hold others, of an earlier plan."""
        if run.name not in self.architectures:
            return False
        if run.role == "final":
            return run.seed in self.seeds
        grid = self.grid
        return grid is not None and run.seed == grid["seed"] and run.learning_rate in grid["learning_rates"]

    @property
    def finals(self) -> list[Run]:
        return [run for result in self.results for run in result.finals.values()]

    @property
    def grid_runs(self) -> dict[tuple[str, float], Run]:
        """By architecture and learning rate."""
        return {(run.name, run.learning_rate): run for run in self.runs if run.role == "grid"}


def load_comparison(directory: str | Path) -> ComparisonRecord:
    """Read `compare.json` and every `runs/*/record.json`; runs that are not there yet are absent.

    Raises:
        LeanError: a file is missing, not JSON, lacks a field, or repeats another run or does not fit the others; the
            message names the file.
    """
    directory = Path(directory)
    plan = read_record(directory / "compare.json", COMPARISON, AGAIN)
    rows = {name: entry["row"] for name, entry in plan["entries"].items()}
    uptrained = {name: entry["uptrain"] for name, entry in plan["entries"].items() if "uptrain" in entry}
    named = {field.name for field in fields(ComparisonRecord)} & plan.keys()
    comparison = ComparisonRecord(**{name: plan[name] for name in named}, rows=rows, uptrained=uptrained)
    runs: dict[Any, tuple[Path, Run]] = {}
    for path in sorted(directory.glob("runs/*/record.json")):
        with reading(path, AGAIN) as record:
            run = Run.from_record(record)
        if not comparison.asks_for(run):
            continue
        if (scores := path.with_name("tasks.json")).exists():
            found = read_record(scores, TASKS, AGAIN)
            # Scores with another `limit` come from an earlier start; they are made again.
            figures = found["tasks"] if found.get("limit") == plan.get("limit") else {}
            # Groups of tasks, which have no examples of their own, are means of the others.
            single = {name: one["acc"] for name, one in figures.items() if "acc" in one and one.get("examples", 1)}
            run = replace(run, tasks=single)
        key = (run.role, run.name, run.seed, run.learning_rate if run.role == "grid" else None)
        if key in runs:
            raise LeanError(f"{path}: the same run as {runs[key][0]}; remove one of the two directories")
        runs[key] = (path, run)
    _check_finals(comparison, [(path, run) for path, run in runs.values() if run.role == "final"])
    return replace(comparison, runs=[run for _, run in runs.values()])


def _check_finals(comparison: ComparisonRecord, finals: Sequence[tuple[Path, Run]]) -> None:
    """Refuse final runs of one model that differ in their recipe, and pairs of different machines or precisions."""
    of_model: dict[str, tuple[Path, Run]] = {}
    of_pair: dict[tuple[int, int], tuple[Path, Run]] = {}
    for path, run in finals:
        other_path, other = of_model.setdefault(run.name, (path, run))
        if different := [name for name, value in run.recipe.items() if other.recipe.get(name) != value]:
            raise LeanError(
                f"{path.parent.name} and {other_path.parent.name} differ in {different[0].replace('_', ' ')}: a "
                "model has one recipe for all seeds. Remove those of one of the two, and run the comparison again"
            )
    for path, run in finals:
        if run.loss is None:
            continue
        group = next(number for number, names in enumerate(comparison.groups) if run.name in names)
        other_path, other = of_pair.setdefault((group, run.seed), (path, run))
        alike = same_place(run.hardware, other.hardware) and run.precision["choice"] == other.precision["choice"]
        if not alike:
            place, known = (f"{place_of(each.hardware)}, {each.precision['choice']}" for each in (run, other))
            raise LeanError(
                f"{path.parent.name} ran on {place}, {other_path.parent.name} on {known}: a pair is of one machine and "
                "precision. Remove one of the two directories and run the comparison again on the machine of the other"
            )
