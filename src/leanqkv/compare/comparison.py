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
from ..errors import LeanError, needs
from ..files import partial_name
from ..job import Job
from ..model.shapes import count_parameters
from ..records import COMPARISON as PLAN
from ..train import (
    Precision,
    RunSpec,
    Step,
    choose_micro_batch,
    free_memory,
    parse_precision,
)
from ..train.directory import RECORD
from ..train.micro_batch import fastest_precision, split_batch
from ..train.spec import RunSettings
from ..train.tasks import Data, check_fit
from .jobs import PlannedRun, Update, run_jobs
from .launch import Cluster, Launcher
from .places import as_begun, to_train_here
from .suite import Comparison, shortened

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
    """Train whatever is not trained yet; `out` then holds compare.json and one directory per run under runs/.

    Args:
        precision: "auto" times the candidates on the baseline once; every run then uses the same one.
        jobs: runs at a time. Default: on a CPU one for each core if the models are small, else one; of a cluster all.
        cluster: whose jobs the runs are; None: they are processes of this command.

    Raises:
        LeanError: names or data that do not fit, or `out` holds another comparison.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LeanError("a comparison starts its own processes; under torchrun use `leanqkv train` for each model")
    needs("train", "accelerate")
    elsewhere = cluster is not None and cluster.elsewhere
    if not elsewhere:
        device = check_device(device)
    asked, recipes = parse_precision(precision), comparison.recipes
    context = comparison.context_length or min(c.max_position_embeddings for c in comparison.configs.values())
    for label, config in comparison.configs.items():
        check_fit(label, config, data, context, recipes[label], comparison.evaluation_sequences)
        split_batch(recipes[label].batch_size, comparison.micro_batch_size, 1)  # refuses a batch that does not divide
    comparison = replace(comparison, context_length=context)
    directory = _Directory(out, comparison, data.sha256, asked, device, jobs, elsewhere)
    directory.begin()
    launcher = None if cluster is None else Launcher(cluster, out)
    if launcher is not None and directory.precision is None:
        on_message("a job chooses micro-batch and precision")
        directory = launcher.wait_for(_settled, directory)
    workers = directory.settle(on_message)
    threads, settings = directory.content["threads"], {"device": device, "batches": out / "batches"}

    def train_all(todo: list[PlannedRun]) -> dict[Path, dict[str, Any]]:
        on_jobs(todo)
        todo = sorted(todo, key=lambda job: not (job.out / RECORD).exists())  # finished ones first
        if launcher is None:
            return run_jobs(todo, data, settings, workers, threads, on_update)
        at_once = jobs or len(todo) if elsewhere else workers
        return launcher.run(todo, data, settings, threads, at_once, on_message, on_update)

    rates = {label: recipe.learning_rate for label, recipe in recipes.items()}
    if comparison.learning_rates:
        tried = product(rates, comparison.learning_rates)
        grid = [as_begun(directory.job(label, comparison.grid_seed, rate, "grid")) for label, rate in tried]
        rates = _best_rates(grid, train_all(grid))
    directory.write(chosen_learning_rate=rates)
    finals = [directory.job(label, seed, rates[label], "final") for seed in comparison.seeds for label in rates]
    train_all(to_train_here(finals, directory.here, elsewhere, on_message))


def default_jobs(device: str, parameters: int) -> int:
    """Return how many runs to train at a time.

    Small models leave most of a core idle waiting for another, so each gets one core to itself.
    """
    return available_cores() if device == "cpu" and parameters < SMALL_MODEL else 1


def slug(name: str) -> str:
    """Return a directory name for a model name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", name)


class _Directory(Job):
    """The directory of a comparison: compare.json, and under runs/ one directory per run.

    Attributes:
        asked: the precision of the command line; None: the fastest.
        device: of the runs; None: the default one of the machine that they are made on.
        elsewhere: the runs are made on the machines of a cluster, not on this one.
    """

    def __init__(
        self,
        out: Path,
        comparison: Comparison,
        data_sha256: str,
        asked: Precision | None,
        device: str | None,
        jobs: int | None,
        elsewhere: bool,
    ):
        """Read what an earlier start wrote, which may have had fewer models or seeds.

        Raises:
            LeanError: `out` holds something else.
        """
        self.comparison, self.data_sha256 = comparison, data_sha256
        self.asked, self.device, self.jobs, self.elsewhere = asked, device, 1 if elsewhere else jobs, elsewhere
        super().__init__(out, self._plan(), COMPARISON)
        again = f"choose another `out` or delete {out}"
        self.claim("comparison", PLAN, again, ignored=("command", "title", "notes"), grows=self._grows)

    def _plan(self) -> dict[str, Any]:
        """compare.json as it is before anything has run."""
        comparison, grid = self.comparison, None
        if comparison.learning_rates is not None:
            grid = {"seed": comparison.grid_seed, "learning_rates": list(comparison.learning_rates)}
            grid |= {} if comparison.grid_steps is None else {"steps": comparison.grid_steps}
        return {name: getattr(comparison, name) for name in RECORDED} | {
            "baseline": next(iter(comparison.entries)),
            "architectures": list(comparison.entries),
            "groups": [[entry.label for entry in group] for group in comparison.groups],
            "entries": {
                label: {"model": entry.model, "recipe": dict(entry.recipe), "row": entry.row}
                for label, entry in comparison.entries.items()
            },
            "seeds": list(comparison.seeds),
            "grid": grid,
            "recipe": dict(comparison.recipe),
            "data_sha256": self.data_sha256,
            "notes": list(comparison.notes),
            **({} if comparison.base is None else {"base": comparison.base}),
        }

    def _grows(self, different: Sequence[str], there: Mapping[str, Any]) -> bool:
        """Whether this plan has all of the one there, and models or seeds besides."""
        return (
            {*different} <= {*GROWING}
            and len(there["groups"]) == len(self.spec["groups"])
            and all(own == more[: len(own)] for own, more in zip(there["groups"], self.spec["groups"], strict=True))
            and there["entries"].items() <= self.spec["entries"].items()
            and {*there["seeds"]} <= {*self.spec["seeds"]}
        )

    def begin(self) -> None:
        """Write the plan, unless a run of it could not be made.

        Raises:
            LeanError: a recipe or a directory's name that cannot be, or what was settled by an earlier start does not
                fit what is asked now.
        """
        comparison, names = self.comparison, []
        for label, recipe in comparison.recipes.items():
            rates = comparison.learning_rates
            finals = product(comparison.seeds, rates or (recipe.learning_rate,))
            jobs = [self.job(label, seed, rate, "final") for seed, rate in finals]
            jobs += [self.job(label, comparison.grid_seed, rate, "grid") for rate in rates or ()]
            names += [partial_name(job.out).name for job in jobs]
            if (kept := self.content.get("chosen_micro_batch_size")) and recipe.batch_size % kept:
                raise LeanError(
                    f"{self.directory} was begun with micro-batches of {kept}, which the batch of {label}, "
                    f"{recipe.batch_size}, is not made of; choose another `out` for it"
                )
        if repeated := [name for name in names if names.count(name) > 1]:
            raise LeanError(f"two runs would have one directory, {repeated[0]}; learning rates count to six digits")
        if len(longest := max(names, key=len)) > NAME_MAX:
            raise LeanError(f"a directory of {len(longest)} characters cannot be made: {longest}; give a shorter label")
        self.write()

    @property
    def here(self) -> dict[str, Any] | None:
        """The machine of the runs as records name it, with their threads; None while a cluster's is not known."""
        if self.elsewhere:
            return self.content.get("cluster_hardware")
        return {**hardware(self.device or default_device()), "threads": self.content.get("threads")}

    @property
    def precision(self) -> Precision | None:
        """The precision that is settled for the machine of the runs, or None.

        Raises:
            LeanError: another one is asked.
        """
        record = self.here and self.content.get("places", {}).get(place_of(self.here))
        if not record:
            return None
        begun = parse_precision(record["choice"], record["milliseconds_per_step"])
        if begun is None:
            raise LeanError(f"{self.file} names no precision that was chosen, found {record['choice']!r}")
        if self.asked not in (None, begun):
            raise LeanError(
                f"{self.directory} was begun in {begun}, {self.asked} is asked; choose another `out` or delete it"
            )
        return begun

    def settle(self, on_message: Callable[[str], None]) -> int:
        """Settle threads, micro-batch and precision of every run, and return how many runs to train at a time.

        What was settled before stays: with other `jobs` the numbers would not be the same. The precision is that of
        the machine: another processor may be fast in another one.
        """
        device, comparison = self.device or default_device(), self.comparison
        largest = max(count_parameters(config).total for config in comparison.configs.values())
        workers = min(comparison.runs, self.jobs or default_jobs(device, largest))
        # Kept, because sums in another number of threads round differently: a run goes on as it began.
        threads = torch.get_num_threads()  # of all cores, or what OMP_NUM_THREADS says
        if device == "cpu":
            threads = min(threads, max(1, available_cores() // workers))
        torch.set_num_threads(self.content.setdefault("threads", threads))
        if comparison.micro_batch_size is None:
            if "chosen_micro_batch_size" not in self.content:
                chosen = choose_micro_batch([*map(self._step, comparison.configs)], free_memory(device) // workers)
                on_message(str(chosen))
                self.write(chosen_micro_batch_size=chosen.size)
            self.comparison = comparison = replace(comparison, micro_batch_size=self.content["chosen_micro_batch_size"])
        if self.precision is None:
            baseline = next(iter(comparison.entries))
            step, steps = self._step(baseline), comparison.recipes[baseline].steps
            precision = self.asked or fastest_precision(step, comparison.micro_batch_size, steps, on_message)
            record, here = precision.record(), self.here
            assert here is not None
            self.write(precision=record, places=self.content.get("places", {}) | {place_of(here): record})
        return workers

    def _step(self, label: str) -> Step:
        """A training step of a model."""
        comparison, device = self.comparison, self.device or default_device()
        assert comparison.context_length is not None
        batch_size = comparison.recipes[label].batch_size
        return Step(comparison.configs[label], batch_size, comparison.context_length, device, self.asked)

    def job(self, label: str, seed: int, learning_rate: float, role: str) -> PlannedRun:
        """Return a run of the comparison, in the precision that is settled."""
        comparison, precision = self.comparison, self.precision or Precision()
        overrides = {**comparison.recipe, "learning_rate": learning_rate}
        if role == "grid" and comparison.grid_steps is not None:
            overrides = shortened(overrides, comparison.recipes[label].steps, comparison.grid_steps)
        spec = RunSpec(
            **{setting.name: getattr(comparison, setting.name) for setting in fields(RunSettings)},
            name=label,
            config=comparison.configs[label].as_overrides(),
            recipe=comparison.entries[label].full_recipe(overrides),
            seed=seed,
            precision=str(precision),
            precision_timings=precision.timings,
            data_sha256=self.data_sha256,
            role=role,
        )
        return PlannedRun(spec, self.directory / "runs" / f"{slug(label)}-{role}-lr{learning_rate:g}-seed{seed}")


def _settled(directory: _Directory) -> _Directory:
    """Settle a comparison in a job; its log has the messages."""
    elsewhere, directory.elsewhere = directory.elsewhere, False  # this is the machine of the runs
    directory.settle(print)
    if elsewhere:
        directory.write(cluster_hardware=directory.here)
    directory.elsewhere = elsewhere
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
