"""Running a comparison: every architecture on every seed, on the same batches, several runs at a time on a CPU."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..environment import available_cores, check_device, default_device, free_memory, hardware, place_of
from ..errors import LeanError, needs
from ..files import partial_name
from ..job import Job
from ..model.shapes import count_parameters
from ..presets.recipes import shortened
from ..records import COMPARISON as PLAN
from ..train.directory import RECORD
from ..train.micro_batch import Step, choose_micro_batch, split_batch
from ..train.precision import Precision, choose_precision, parse_precision
from ..train.processes import check_shard, connect, first_decides, in_torchrun, process_count
from ..train.spec import RunSettings, RunSpec
from ..train.tasks import Data, check_fit
from .jobs import PlannedRun, Update, run_jobs
from .launch import Cluster, Launcher
from .places import as_begun, to_train_here
from .suite import Comparison
from .tasks import Tasks, score_runs
from .uptraining import check_uptrained, converted_starts

COMPARISON = "compare.json"
# The fields of a comparison that compare.json has as they are.
RECORDED = (
    *("title", "suite", "scale", "command"),
    *("context_length", "evaluation_sequences", "evaluate_every", "micro_batch_size", "shard"),
)
# What a later start may add to: models at the end of a group, seeds, and tasks to score.
GROWING = ("groups", "entries", "seeds", "tasks", "limit")
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
    include_path: Path | None = None,
    on_message: Callable[[str], None] = lambda text: None,
    on_jobs: Callable[[Sequence[PlannedRun]], None] = lambda jobs: None,
    on_update: Callable[[Update], None] = lambda update: None,
) -> None:
    """Train whatever is not trained yet; `out` then holds compare.json and one directory per run under runs/.

    Args:
        precision: "auto" times the candidates on the baseline once; every run then uses the same one.
        jobs: runs at a time. Default: on a CPU one for each core if the models are small, else one; of a cluster all.
        cluster: whose jobs the runs are; None: they are processes of this command, or all of torchrun's processes train
            one run after another.
        include_path: a folder with tasks of one's own, as `load_tasks` takes it.

    Raises:
        LeanError: names or data that do not fit, or `out` holds another comparison.
    """
    needs("train", "accelerate")
    if cluster is None or not cluster.elsewhere:
        device = check_device(device)
    processes = processes_of_a_run(cluster, comparison.shard, device, jobs)
    other = [label for label, config in comparison.configs.items() if config.task != "causal_lm"]
    if comparison.tasks and other:
        raise LeanError(f"`tasks` are for models that predict the next token, and {other[0]} is not one; leave it out")
    tasks = first_decides(lambda: Tasks.checked(comparison.tasks, comparison.limit, include_path))
    context = comparison.context_length or min(c.max_position_embeddings for c in comparison.configs.values())
    comparison = replace(comparison, context_length=context)
    where = parse_precision(precision), device, jobs, cluster is not None and cluster.elsewhere, processes
    begun = first_decides(lambda: _Directory(out, comparison, data.sha256, *where).begun(data))
    launcher = None if cluster is None else Launcher(cluster, out, comparison.shard, on_message)
    runs = _Runs(begun, data, launcher, jobs, on_message, on_jobs, on_update)

    rates = runs.best_rates(comparison)
    job = runs.directory.job
    finals = {(label, seed): job(label, seed, rates[label], "final") for seed in comparison.seeds for label in rates}
    scratch = [job for (label, _), job in finals.items() if comparison.entries[label].uptrain is None]
    runs.train_here(scratch)
    if len(scratch) < len(finals):
        started = first_decides(lambda: converted_starts(comparison, finals, out / "converted", on_message))
        runs.train_here([*scratch, *started])
    if tasks is not None:
        here = (lambda score, *of: score(*of)) if launcher is None else launcher.wait_for
        here(score_runs, [job.out for job in finals.values()], tasks, comparison.shard, device)


class _Runs:
    """The runs of a comparison in the making, by this command and torchrun's processes, or by the jobs of a cluster.

    at_once: runs at a time; None: all.
    """

    def __init__(
        self,
        directory: "_Directory",
        data: Data,
        launcher: Launcher | None,
        jobs: int | None,
        on_message: Callable[[str], None],
        on_jobs: Callable[[Sequence[PlannedRun]], None],
        on_update: Callable[[Update], None],
    ):
        """Settle threads, micro-batch and precision, on the machine of the runs."""
        if launcher is not None and directory.precision is None:
            on_message("a job chooses micro-batch and precision")
            directory = launcher.wait_for(_settled, directory)
        self.directory, workers = first_decides(lambda: (directory, directory.settle(on_message)))
        torch.set_num_threads(self.directory.content["threads"])
        self.data, self.launcher = data, launcher
        self.at_once = jobs if self.directory.elsewhere else workers
        self.on_message, self.on_jobs, self.on_update = on_message, on_jobs, on_update

    def train(self, todo: list[PlannedRun]) -> dict[Path, dict[str, Any]]:
        """Train what is not trained yet, and return the record of each."""
        self.on_jobs(todo)
        done = first_decides(lambda: {job.out for job in todo if (job.out / RECORD).exists()})
        todo = sorted(todo, key=lambda job: job.out not in done)
        settings: dict[str, Any] = {"device": self.directory.device, "batches": self.directory.directory / "batches"}
        settings["threads"] = self.directory.content["threads"]
        run = run_jobs if self.launcher is None else self.launcher.run
        return run(todo, self.data, settings, self.at_once or len(todo), self.on_update)

    def train_here(self, todo: list[PlannedRun]) -> None:
        """The same of those that were not begun on another machine."""
        directory = self.directory
        self.train(first_decides(lambda: to_train_here(todo, directory.here, directory.elsewhere, self.on_message)))

    def best_rates(self, comparison: Comparison) -> dict[str, float]:
        """Return the learning rate of every model, searched if that is asked; it is written down."""
        directory, searched = self.directory, comparison.learning_rates
        rates = {label: recipe.learning_rate for label, recipe in comparison.recipes.items()}
        if searched:
            tried = list(product(rates, searched))
            grid = first_decides(
                lambda: [as_begun(directory.job(label, comparison.grid_seed, rate, "grid")) for label, rate in tried]
            )
            records = self.train(grid)
            rates = first_decides(lambda: _best_rates(grid, records))
        first_decides(lambda: directory.write(chosen_learning_rate=rates))
        return rates


def processes_of_a_run(cluster: Cluster | None, shard: str | None, device: str | None, jobs: int | None) -> int:
    """Return of how many processes each run is, and connect them where they are those of torchrun.

    Raises:
        LeanError: torchrun's processes cannot train what is asked, or there are none.
    """
    if in_torchrun() and cluster is not None:
        raise LeanError("`launcher=submitit` starts the processes of each run; start the command without torchrun")
    if in_torchrun() and jobs not in (None, 1):
        raise LeanError(f"`jobs` is {jobs}: the processes of torchrun train one run at a time; leave it out")
    if cluster is not None:
        check_shard(shard)
        return max(1, cluster.gpus)
    connect(check_device(device), shard)
    return process_count()


def default_jobs(device: str, parameters: int, processes: int = 1) -> int:
    """Return how many runs of so many processes to train at a time.

    Small models leave most of a core idle waiting for another, so each process gets one core to itself.
    """
    return max(1, available_cores() // processes) if device == "cpu" and parameters < SMALL_MODEL else 1


def slug(name: str) -> str:
    """Return a directory name for a model name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", name)


class _Directory(Job):
    """The directory of a comparison: compare.json, and under runs/ one directory per run.

    Attributes:
        asked: the precision of the command line; None: the fastest.
        device: of the runs; None: the default one of the machine that they are made on.
        elsewhere: the runs are made on the machines of a cluster, not on this one.
        processes: of each run.
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
        processes: int,
    ):
        """Read what an earlier start wrote, which may have had fewer models or seeds.

        Raises:
            LeanError: `out` holds something else.
        """
        self.comparison, self.data_sha256 = comparison, data_sha256
        self.asked, self.device, self.jobs, self.elsewhere = asked, device, 1 if elsewhere else jobs, elsewhere
        self.processes = processes
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
            "groups": [[entry.label for entry in group] for group in comparison.groups],
            "entries": {
                label: {"model": entry.model, "recipe": dict(entry.recipe), "row": entry.row}
                | ({} if entry.uptrain is None else {"uptrain": entry.uptrain})
                for label, entry in comparison.entries.items()
            },
            "seeds": list(comparison.seeds),
            "grid": grid,
            "recipe": dict(comparison.recipe),
            "data_sha256": self.data_sha256,
            "notes": list(comparison.notes),
            **({"tasks": list(comparison.tasks), "limit": comparison.limit} if comparison.tasks else {}),
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

    def begun(self, data: Data) -> "_Directory":
        """Write the plan, unless a run of it could not be made.

        Raises:
            LeanError: models, a recipe, data or a directory's name that cannot be, or what was settled by an earlier
                start does not fit what is asked now.
        """
        comparison, names = self.comparison, []
        assert comparison.context_length is not None
        check_uptrained(comparison)
        for label, recipe in comparison.recipes.items():
            config = comparison.configs[label]
            check_fit(label, config, data, comparison.context_length, recipe, comparison.evaluation_sequences)
            split_batch(recipe.batch_size, comparison.micro_batch_size, self.processes)  # refuses what is left over
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
        return self

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
        jobs = self.jobs or (1 if in_torchrun() else default_jobs(device, largest, self.processes))
        workers = min(comparison.runs, jobs)
        # Kept, because sums in another number of threads round differently: a run goes on as it began.
        threads = torch.get_num_threads()  # of all cores, or what OMP_NUM_THREADS says
        if device == "cpu":
            threads = min(threads, max(1, available_cores() // (workers * self.processes)))
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
            precision = self.asked or choose_precision(step, comparison.micro_batch_size, steps, on_message)
            assert self.here is not None
            self.write(places=self.content.get("places", {}) | {place_of(self.here): precision.record()})
        return workers

    def _step(self, label: str) -> Step:
        """A training step of a model."""
        comparison, device = self.comparison, self.device or default_device()
        assert comparison.context_length is not None
        batch_size = comparison.recipes[label].batch_size
        return Step(
            *(comparison.configs[label], batch_size, comparison.context_length, device, self.asked),
            shard=comparison.shard,
            processes=self.processes,
        )

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
    """Settle a comparison in a job; its log has the messages. Of several processes the first one does."""
    connect(check_device(directory.device), directory.comparison.shard)
    elsewhere, directory.elsewhere = directory.elsewhere, False  # this is the machine of the runs
    first_decides(lambda: directory.settle(print))
    if elsewhere:
        first_decides(lambda: directory.write(cluster_hardware=directory.here))
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
