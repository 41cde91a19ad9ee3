"""The records of a comparison as they lie in its directory: its plan, and a run per architecture and seed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LeanError
from ..files import RECORD_FORMAT, read_json
from .statistics import Curve, PairedDifference, paired_difference

DATA_FIELDS = ("description", "sha256", "train_tokens", "validation_tokens", "bytes_per_token")
IMAGE_FIELDS = ("description", "sha256", "train_images", "test_images")
RECIPE_FIELDS = {"steps": int, "batch_size": int, "learning_rate": float}  # what the report counts with


@dataclass(frozen=True)
class Measure:
    """What models are judged by, and whether `lower` or `higher` is better."""

    name: str
    better: str


LOSS, ACCURACY = Measure("validation loss", "lower"), Measure("test accuracy", "higher")


@dataclass(frozen=True)
class Run:
    """One record: what was trained, how, on what, and what came out."""

    role: str
    name: str
    seed: int
    recipe: Mapping[str, Any]
    context_length: int
    parameters: Mapping[str, int]
    kv_bytes: int
    data: Mapping[str, Any]
    vocab_size: int | None  # of the data, where the record has it
    batch_plan: Mapping[str, Any]
    precision: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    git_commit: str | None
    tokens: int
    evaluations: Curve
    loss: float | None  # at the end; None while it runs and where it diverged
    perplexity: float | None  # of text
    accuracy: float | None  # of images, and during training
    accuracies: Curve
    tokens_per_second: float | None
    seconds: float
    diverged: tuple[int, str] | None  # step, reason

    @property
    def learning_rate(self) -> float:
        return self.recipe["learning_rate"]

    @property
    def images(self) -> bool:
        return "train_images" in self.data

    @property
    def measure(self) -> Measure:
        return ACCURACY if self.images else LOSS

    @property
    def score(self) -> float | None:
        """The final value of what it is judged by."""
        return self.accuracy if self.images else self.loss

    @property
    def scores(self) -> Curve:
        return self.accuracies if self.images else self.evaluations

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Run":
        if record["record"] != RECORD_FORMAT:
            raise ValueError(f"record version {record['record']}, this leanqkv reads version {RECORD_FORMAT}")
        final, stop = record["final"] or {}, record["diverged"]
        diverged = None if stop is None else (int(stop["step"]), str(stop["reason"]))
        loss = None if diverged else final.get("validation_loss")
        if loss is not None and not math.isfinite(loss):
            loss, diverged = None, (int(record["recipe"]["steps"]), f"validation loss {loss}")
        evaluations = {int(at["step"]): at["loss"] for at in record["evaluations"]}
        kept = IMAGE_FIELDS if "train_images" in record["data"] else DATA_FIELDS
        outcomes = {name: final.get(name) for name in ("perplexity", "accuracy")}
        perplexity, accuracy = (None if loss is None or x is None else float(x) for x in outcomes.values())
        return cls(
            role=record["role"],
            name=record["name"],
            seed=int(record["seed"]),
            recipe=record["recipe"] | {key: kind(record["recipe"][key]) for key, kind in RECIPE_FIELDS.items()},
            context_length=int(record["context_length"]),
            parameters={kind: int(record["parameters"][kind]) for kind in ("total", "non_embedding")},
            kv_bytes=int(record["kv_bytes_per_token"]["bfloat16"]),
            data={key: record["data"][key] for key in kept},
            vocab_size=record["data"].get("vocab_size"),
            batch_plan={key: record["batch_plan"][key] for key in ("sha256", "evaluation_sequences")},
            precision=str(record["precision"]["choice"]),
            hardware=record["hardware"],
            versions=record["versions"],
            git_commit=record["git_commit"],
            tokens=int(record["tokens"]),
            evaluations={step: float(x) for step, x in evaluations.items() if x is not None and math.isfinite(x)},
            loss=None if loss is None else float(loss),
            perplexity=perplexity,
            accuracy=accuracy,
            accuracies={int(at["step"]): float(at["accuracy"]) for at in record["evaluations"] if "accuracy" in at},
            tokens_per_second=record["tokens_per_second"],
            seconds=float(record["seconds"]),
            diverged=diverged,
        )


def state_of(run: Run | None) -> str:
    """`finished`, `diverged` or `missing`, which a run that still goes on is too."""
    if run is None or (run.loss is None and run.diverged is None):
        return "missing"
    return "diverged" if run.diverged else "finished"


@dataclass(frozen=True)
class Grid:
    """The learning rates each architecture was tried with, on one seed, before the final runs."""

    seed: int
    learning_rates: Sequence[float]


@dataclass(frozen=True)
class Result:
    """What is known of one architecture; `finals` holds its runs by seed, those that did not finish included."""

    name: str
    style: int
    finals: Mapping[int, Run]
    any_run: Run | None  # for what all its runs share: sizes
    learning_rate: float | None
    baseline: "Result | None"  # None for a baseline
    difference: PairedDifference | None

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run.loss for seed, run in self.finals.items() if run.loss is not None}

    @property
    def scores(self) -> dict[int, float]:
        """The final value of what it is judged by, by seed: the loss of text, the accuracy of images."""
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
        return state_of(self.finals.get(seed))

    def curves(self) -> dict[int, Curve]:
        """What it is judged by during training, by seed, of the runs that did not diverge."""
        return {seed: run.scores for seed, run in self.finals.items() if run.diverged is None}


@dataclass(frozen=True)
class Comparison:
    """A comparison as far as it has come: its plan, and the records of the runs there are.

    Attributes:
        groups: architectures, in each group the baseline of the others first.
        rows: which line of the papers' tables an architecture stands for, where it does.
        recipe: what was asked for in place of the architectures' own recipes.
    """

    title: str
    suite: str | None
    scale: str | None
    command: str
    groups: Sequence[Sequence[str]]
    rows: Mapping[str, str]
    recipe: Mapping[str, Any]
    seeds: Sequence[int]
    grid: Grid | None
    chosen_learning_rate: Mapping[str, float]  # empty until the search is done
    notes: Sequence[str]
    runs: Sequence[Run] = field(repr=False)

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
    def results(self) -> list[Result]:
        """One per architecture, group by group."""
        finals = {
            name: {run.seed: run for run in self.runs if run.role == "final" and run.name == name}
            for name in self.architectures
        }

        def result(name: str, baseline: Result | None) -> Result:
            own = list(finals[name].values())
            rate = own[0].learning_rate if own else self.chosen_learning_rate.get(name)
            any_run = next((run for run in self.runs if run.name == name), None)
            style = self.architectures.index(name)
            found = Result(name, style, finals[name], any_run, rate, baseline, None)
            return replace(found, difference=paired_difference(found.scores, baseline.scores)) if baseline else found

        results = []
        for first, *others in self.groups:
            baseline = result(first, None)
            results += [baseline, *(result(name, baseline) for name in others)]
        return results

    def asks_for(self, run: Run) -> bool:
        """Whether a run is part of this comparison; its directory may hold others, of an earlier plan."""
        if run.name not in self.architectures:
            return False
        if run.role == "final":
            return run.seed in self.seeds
        return self.grid is not None and run.seed == self.grid.seed and run.learning_rate in self.grid.learning_rates

    @property
    def finals(self) -> list[Run]:
        return [run for result in self.results for run in result.finals.values()]

    @property
    def grid_runs(self) -> dict[tuple[str, float], Run]:
        """By architecture and learning rate."""
        return {(run.name, run.learning_rate): run for run in self.runs if run.role == "grid"}


def load_comparison(directory: str | Path) -> Comparison:
    """Reads `compare.json` and every `runs/*/record.json`; runs that are not there yet are simply absent.

    Raises:
        LeanError: a file is missing, not JSON, lacks a field, or repeats another run; the message names the file.
    """
    directory = Path(directory)
    with _reading(directory / "compare.json") as plan:
        baseline = str(plan["baseline"])
        grid = plan["grid"] and Grid(int(plan["grid"]["seed"]), [float(x) for x in plan["grid"]["learning_rates"]])
        group = [baseline, *(str(name) for name in plan["architectures"] if name != baseline)]
        comparison = Comparison(
            title=str(plan["title"]),
            suite=plan["suite"],
            scale=plan.get("scale"),
            command=str(plan["command"]),
            groups=[[str(name) for name in names] for names in plan.get("groups", [group])],
            rows={name: str(entry["row"]) for name, entry in plan.get("entries", {}).items()},
            recipe=plan.get("recipe") or {},
            seeds=[int(seed) for seed in plan["seeds"]],
            grid=grid,
            chosen_learning_rate={name: float(rate) for name, rate in plan.get("chosen_learning_rate", {}).items()},
            notes=[str(note) for note in plan["notes"]],
            runs=[],
        )
    found: dict[tuple[str, str, int, float | None], tuple[Path, Run]] = {}
    for path in sorted(directory.glob("runs/*/record.json")):
        with _reading(path) as record:
            run = Run.from_record(record)
        if not comparison.asks_for(run):
            continue
        key = (run.role, run.name, run.seed, run.learning_rate if run.role == "grid" else None)
        if key in found:
            raise LeanError(f"{path}: the same run as {found[key][0]}; remove one of the two directories")
        found[key] = (path, run)
    return replace(comparison, runs=[run for _, run in found.values()])


@contextmanager
def _reading(path: Path) -> Iterator[dict[str, Any]]:
    """The file's JSON; whatever the body then finds wrong with it becomes one line that names the file."""
    content = read_json(path)
    again = "remove it and run the comparison again"
    try:
        yield content
    except KeyError as error:
        raise LeanError(f"{path}: field {error} is missing; {again}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise LeanError(f"{path} cannot be read: {error}; {again}") from None
