"""Running a comparison: every architecture on every seed, on the same batches, several runs at a time on a CPU."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..environment import available_cores, check_device, default_device, hardware, place_of
from ..errors import LeanError
from ..files import partial_name
from ..job import Job
from ..presets import Recipe, preset
from ..records import COMPARISON as PLAN
from ..train import (
    Precision,
    RunSpec,
    Step,
    choose_micro_batch,
    choose_precision,
    free_memory,
    parse_precision,
)
from ..train.directory import RECORD
from ..train.micro_batch import split_batch
from ..train.spec import RunSettings
from ..train.tasks import Data, check_fit
from .jobs import PlannedRun, Update, run_jobs
from .launch import Cluster, Launcher
from .places import as_begun, to_train_here
from .suite import Comparison, Entry, shortened

COMPARISON = "compare.json"
# The fields of a comparison that compare.json has as they are.
RECORDED = (
    *("title", "suite", "scale", "command"),
    *("context_length", "evaluation_sequences", "evaluate_every", "micro_batch_size"),
)
# What a later start may add to: models at the end of a group, and seeds.
GROWING = ("architectures", "groups", "entries", "seeds")
NAME_MAX = 255  # of a directory on the file systems of Linux, macOS and Windows
# Above this many parameters a CPU is used better by one run on all cores than by one run a core.
SMALL_MODEL = 20_000_000


def run_comparison(
    comparison: Comparison,
    data: Data,
    out: Path,
    *,
    precision: str = "auto",
    device: str | None = None,
    jobs: int | None = None,
    cluster: Cluster | None = None,
    on_message: Callable[[str], None] = lambda text: None,
    on_jobs: Callable[[Sequence[PlannedRun]], None] = lambda jobs: None,
    on_update: Callable[[Update], None] = lambda update: None,
) -> None:
    """Train what is not trained yet; `out` then holds compare.json and one directory per run under runs/.

    Args:
        precision: "auto" times the candidates on the baseline once; every run then uses the same one.
        jobs: runs at a time. Default: on a CPU one for each core if the models are small, else one; of a cluster all.
        cluster: where each run is a job of its own; None: all are processes of this command.
        on_message, on_jobs, on_update: called with progress, for a display.

    Raises:
        LeanError: names or data that do not fit, or `out` holding another comparison.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LeanError("a comparison starts its own processes; under torchrun use `leanqkv train` for each model")
    elsewhere = cluster is not None and cluster.elsewhere
    if not elsewhere:
        device = check_device(device or default_device())
    asked = parse_precision(precision)
    configs = {label: preset(entry.model) for label, entry in comparison.entries.items()}
    recipes = {label: entry.full_recipe(comparison.recipe) for label, entry in comparison.entries.items()}
    rates = {label: own.learning_rate for label, own in recipes.items()}
    context = comparison.context_length or min(config.max_position_embeddings for config in configs.values())
    for label, config in configs.items():
        check_fit(label, config, data, context, recipes[label], comparison.evaluation_sequences)
        split_batch(recipes[label].batch_size, comparison.micro_batch_size, 1)  # refuses what does not divide
    directory = _Directory(out, replace(comparison, context_length=context), data.sha256)
    directory.begin(asked, None if elsewhere else device)
    launcher = None if cluster is None else Launcher(cluster, out)
    if launcher is not None and not directory.is_settled(None if elsewhere else device):
        # What fits and what is fast is asked on the device of a job.
        on_message("a job chooses micro-batch and precision")
        directory = launcher.wait_for(_settled, directory, asked, device, 1 if elsewhere else jobs, elsewhere)
    of_cluster = directory.content.get("cluster_hardware") if elsewhere else None
    chosen, workers = directory.settle(asked, "cpu" if elsewhere else device, jobs, on_message, of_cluster)
    threads, settings = directory.content["threads"], {"device": device, "batches": out / "batches"}

    def train_all(todo: list[PlannedRun]) -> dict[Path, dict[str, Any]]:
        on_jobs(todo)
        todo = sorted(todo, key=lambda job: not (job.out / RECORD).exists())  # first what is done
        if launcher is None:
            return run_jobs(todo, data, settings, workers, threads, on_update)
        at_once = jobs or len(todo) if elsewhere else workers
        return launcher.run(todo, data, settings, threads, at_once, on_message, on_update)

    if comparison.learning_rates:
        grid = [
            as_begun(directory.job(label, comparison.grid_seed, rate, "grid", chosen))
            for label in rates
            for rate in comparison.learning_rates
        ]
        rates = _best_rates(grid, train_all(grid))
    directory.write(chosen_learning_rate=rates)
    finals = [directory.job(label, seed, rates[label], "final", chosen) for seed in comparison.seeds for label in rates]
    here = of_cluster if elsewhere else directory.hardware(device)
    train_all(to_train_here(finals, here, elsewhere, on_message))


def default_jobs(device: str, parameters: int) -> int:
    """Return how many runs to train at a time.

    Small models leave most of a core idle waiting for another, so each gets one core to itself.
    """
    return available_cores() if device == "cpu" and parameters < SMALL_MODEL else 1


def slug(name: str) -> str:
    """Return a directory name for a model name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", name)


class _Directory(Job):
    """The directory of a comparison: compare.json, and under runs/ one directory per run."""

    def __init__(self, out: Path, comparison: Comparison, data_sha256: str):
        """Make `out` this comparison's own, or go on with what an earlier start of it wrote.

        That may have had fewer models or seeds.

        Raises:
            LeanError: `out` holds something else.
        """
        self.out, self.comparison, self.data_sha256 = out, comparison, data_sha256
        super().__init__(out, self._plan(), COMPARISON)
        again = f"choose another `out` or delete {out}"
        self.claim("comparison", PLAN, again, ignored=("command", "title", "notes"), grows=self._grows)

    def _grows(self, different: Sequence[str], there: Mapping[str, Any]) -> bool:
        """Whether this plan has all of the one there, and models or seeds besides."""
        return (
            {*different} <= {*GROWING}
            and len(there["groups"]) == len(self.spec["groups"])
            and all(own == more[: len(own)] for own, more in zip(there["groups"], self.spec["groups"], strict=True))
            and there["entries"].items() <= self.spec["entries"].items()
            and {*there["seeds"]} <= {*self.spec["seeds"]}
        )

    def begin(self, asked: Precision | None, device: str | None) -> None:
        """Write the plan, unless a run of it could not be made.

        Raises:
            LeanError: a recipe or a directory's name that cannot be, or what was settled by an earlier start does not
                fit what is asked now.
        """
        self._check_runs(asked or Precision())
        self._check_micro_batch()
        if (begun := self._begun(device)) is not None:
            self._refuse_another(asked, begun)
        self.write()

    def _check_runs(self, precision: Precision) -> None:
        """Make every run's job, at every rate, and check that each has a directory of its own."""
        comparison, names = self.comparison, []
        for label, entry in comparison.entries.items():
            rates, grid = comparison.learning_rates or (), (comparison.grid_seed,)
            finals = rates or (self._recipe(entry).learning_rate,)
            for role, seeds, tried in (("grid", grid, rates), ("final", comparison.seeds, finals)):
                jobs = (self.job(label, seed, rate, role, precision) for seed, rate in product(seeds, tried))
                names += [partial_name(job.out).name for job in jobs]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise LeanError(f"two runs would have one directory, {repeated[0]}; learning rates count to six digits")
        if len(longest := max(names, key=len)) > NAME_MAX:
            raise LeanError(f"a directory of {len(longest)} characters cannot be made: {longest}; give a shorter label")

    def _check_micro_batch(self) -> None:
        """Check that the micro-batch that an earlier start chose divides every batch, those of added models too."""
        kept = self.content.get("chosen_micro_batch_size")
        for label, entry in self.comparison.entries.items():
            if kept and (batch := self._recipe(entry).batch_size) % kept:
                raise LeanError(
                    f"{self.out} was begun with micro-batches of {kept}, which the batch of {label}, {batch}, is not "
                    "made of; choose another --out for it"
                )

    def _recipe(self, entry: Entry) -> Recipe:
        return entry.full_recipe(self.comparison.recipe)

    def _begun(self, device: str | None) -> Precision | None:
        """Return the precision that an earlier start settled for this machine; of None: for those of a cluster."""
        here = self.content.get("cluster_hardware") if device is None else self.hardware(device)
        record = here and self.content.get("places", {}).get(place_of(here))
        return parse_precision(record["choice"]) if record else None

    def _refuse_another(self, asked: Precision | None, begun: Precision) -> None:
        if asked is not None and asked != begun:
            raise LeanError(f"{self.out} was begun in {begun}, {asked} is asked; choose another --out or delete it")

    def _plan(self) -> dict[str, Any]:
        """compare.json as it is before anything has run."""
        comparison = self.comparison
        entries = comparison.entries
        return {name: getattr(comparison, name) for name in RECORDED} | {
            "baseline": next(iter(entries)),
            "architectures": list(entries),
            "groups": [[entry.label for entry in group] for group in comparison.groups],
            "entries": {
                label: {"model": entry.model, "recipe": dict(entry.recipe), "row": entry.row}
                for label, entry in entries.items()
            },
            "seeds": list(comparison.seeds),
            "grid": self._grid(),
            "recipe": dict(comparison.recipe),
            "data_sha256": self.data_sha256,
            "notes": list(comparison.notes),
        }

    def _grid(self) -> dict[str, Any] | None:
        if (rates := self.comparison.learning_rates) is None:
            return None
        grid = {"seed": self.comparison.grid_seed, "learning_rates": list(rates)}
        steps = self.comparison.grid_steps
        return grid if steps is None else {**grid, "steps": steps}

    def is_settled(self, device: str | None) -> bool:
        """Whether `settle` has nothing to choose on this machine; of None: on those of a cluster."""
        return self._begun(device) is not None

    def hardware(self, device: str | None) -> dict[str, Any]:
        """Return this machine as records name it, with the threads that the comparison's runs have."""
        return {**hardware(device or default_device()), "threads": self.content.get("threads")}

    def settle(
        self,
        asked: Precision | None,
        device: str | None,
        jobs: int | None,
        on_message: Callable[[str], None],
        of_cluster: dict[str, Any] | None = None,
    ) -> tuple[Precision, int]:
        """Settle threads, micro-batch and precision of every run; return the precision, and how many runs at a time.

        What was settled before stays: with other `jobs` the numbers would not be the same. The precision is that of
        this machine, or that of a cluster's: another processor may be fast in another one.
        """
        device = check_device(device or default_device())
        models = [preset(entry.model) for entry in self.comparison.entries.values()]
        largest = max(config.plan.count_parameters().total for config in models)
        workers = min(self.comparison.runs, jobs or default_jobs(device, largest))
        # Kept, because sums in another number of threads round differently: a run goes on as it began.
        threads = torch.get_num_threads()  # of all cores, or what OMP_NUM_THREADS says
        if device == "cpu":
            threads = min(threads, max(1, available_cores() // workers))
        torch.set_num_threads(self.content.setdefault("threads", threads))
        self._settle_micro_batch(asked, device, workers, on_message)
        place = place_of(of_cluster or self.hardware(device))
        return self._settle_precision(asked, device, place, on_message), workers

    def _settle_micro_batch(
        self, asked: Precision | None, device: str, workers: int, on_message: Callable[[str], None]
    ) -> None:
        """Set the micro-batch of every run: the one asked for, else the one begun with, else what fits every model."""
        comparison, context_length = self.comparison, self.comparison.context_length
        if comparison.micro_batch_size is not None:
            return
        if "chosen_micro_batch_size" not in self.content:
            assert context_length is not None
            recipes = {label: entry.full_recipe(comparison.recipe) for label, entry in comparison.entries.items()}
            steps = [
                Step(preset(entry.model), recipes[label].batch_size, context_length, device, asked)
                for label, entry in comparison.entries.items()
            ]
            chosen = choose_micro_batch(steps, free_memory(device) // workers)
            on_message(str(chosen))
            self.write(chosen_micro_batch_size=chosen.size)
        self.comparison = replace(comparison, micro_batch_size=self.content["chosen_micro_batch_size"])

    def _settle_precision(
        self, asked: Precision | None, device: str, place: str, on_message: Callable[[str], None]
    ) -> Precision:
        """Return the precision of runs at a place: the one begun in, else the one asked for, else the fastest."""
        by_place = self.content.get("places", {})
        if (record := by_place.get(place)) is None:
            baseline = next(iter(self.comparison.entries.values()))
            recipe, context_length = baseline.full_recipe(self.comparison.recipe), self.comparison.context_length
            assert context_length is not None
            chosen = asked or choose_precision(
                preset(baseline.model),
                batch_size=self.comparison.micro_batch_size or recipe.batch_size,
                context_length=context_length,
                steps=recipe.steps,
                device=device,
                progress=on_message,
            )
            record = chosen.record()
        begun = parse_precision(record["choice"])
        if begun is None:
            raise LeanError(f"{self.out / COMPARISON} names no precision that was chosen, found {record['choice']!r}")
        self._refuse_another(asked, begun)
        self.write(precision=record, places=by_place | {place: record})
        return replace(begun, timings=record["milliseconds_per_step"])

    def job(self, label: str, seed: int, learning_rate: float, role: str, precision: Precision) -> PlannedRun:
        entry = self.comparison.entries[label]
        overrides = {**self.comparison.recipe, "learning_rate": learning_rate}
        if role == "grid" and self.comparison.grid_steps is not None:
            overrides = shortened(overrides, self._recipe(entry).steps, self.comparison.grid_steps)
        spec = RunSpec(
            **{setting.name: getattr(self.comparison, setting.name) for setting in fields(RunSettings)},
            name=label,
            config=preset(entry.model).as_overrides(),
            recipe=entry.full_recipe(overrides),
            seed=seed,
            precision=str(precision),
            precision_timings=precision.timings,
            data_sha256=self.data_sha256,
            role=role,
        )
        out = self.out / "runs" / f"{slug(label)}-{role}-lr{learning_rate:g}-seed{seed}"
        return PlannedRun(spec, out)


def _settled(
    directory: _Directory, asked: Precision | None, device: str | None, jobs: int | None, elsewhere: bool
) -> _Directory:
    """Settle a comparison in a job; what it prints is in the job's log."""
    directory.settle(asked, device, jobs, print)
    if elsewhere:
        directory.write(cluster_hardware=directory.hardware(device))
    return directory


def _best_rates(grid: Sequence[PlannedRun], records: Mapping[Path, Mapping[str, Any]]) -> dict[str, float]:
    """Return each architecture's learning rate of lowest validation loss."""
    losses: dict[str, dict[float, float]] = {job.spec.name: {} for job in grid}
    for job in grid:
        if (final := records[job.out]["final"]) is not None:
            losses[job.spec.name][job.spec.recipe.learning_rate] = final["validation_loss"]
    for label, tried in losses.items():
        if not tried:
            raise LeanError(f"{label} diverged at every learning rate of the grid; try smaller ones")
    return {label: min(tried, key=tried.__getitem__) for label, tried in losses.items()}
