"""Running a comparison: every architecture on every seed, on the same batches, several runs at a time on a CPU."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..environment import available_cores, check_device, default_device
from ..errors import LeanError
from ..files import check_place, make_directory, read_json, write_json
from ..presets import preset
from ..train import (
    Precision,
    RunSpec,
    Step,
    choose_micro_batch,
    choose_precision,
    free_memory,
    parse_precision,
    train,
)
from ..train.micro_batch import split_batch
from ..train.spec import RunSettings
from ..train.tasks import Data, check_fit
from .suite import Comparison

COMPARISON = "compare.json"
# The fields of a comparison that compare.json has as they are.
RECORDED = (
    *("title", "suite", "scale", "command"),
    *("context_length", "evaluation_sequences", "evaluate_every", "micro_batch_size"),
)
# Above this many parameters a CPU is used better by one run on all cores than by one run a core.
SMALL_MODEL = 20_000_000


@dataclass(frozen=True)
class Job:
    """A run to be trained, and its directory."""

    spec: RunSpec
    out: Path


@dataclass(frozen=True)
class Update:
    """One run's progress; `record` once it is done."""

    job: Job
    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    record: dict[str, Any] | None = None


def run_comparison(
    comparison: Comparison,
    data: Data,
    out: Path,
    *,
    precision: str = "auto",
    device: str | None = None,
    jobs: int | None = None,
    on_message: Callable[[str], None] = lambda text: None,
    on_jobs: Callable[[Sequence[Job]], None] = lambda jobs: None,
    on_update: Callable[[Update], None] = lambda update: None,
) -> None:
    """Train what is not trained yet; `out` then holds compare.json and one directory per run under runs/.

    Args:
        precision: "auto" times the candidates on the baseline once; every run then uses the same one.
        jobs: runs at a time. Default: on a CPU one for each core if the models are small, else one.
        on_message, on_jobs, on_update: called with progress, for a display.

    Raises:
        LeanError: names or data that do not fit, or `out` holding another comparison.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LeanError("a comparison starts its own processes; under torchrun use `leanqkv train` for each model")
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
    largest = max(config.plan.count_parameters().total for config in configs.values())
    workers = min(comparison.runs, jobs or default_jobs(device, largest))
    # Kept, because sums in another number of threads round differently: a run goes on as it began.
    own_share = max(1, available_cores() // workers) if device == "cpu" else torch.get_num_threads()
    threads = directory.content.setdefault("threads", own_share)
    torch.set_num_threads(threads)
    directory.settle_micro_batch(asked, device, workers, on_message)
    chosen = directory.settle_precision(asked, device, on_message)

    def train_all(todo: list[Job]) -> dict[Path, dict[str, Any]]:
        on_jobs(todo)
        return _run_jobs(todo, data, {"device": device, "batches": out / "batches"}, workers, threads, on_update)

    if comparison.learning_rates:
        grid = [
            directory.job(label, comparison.grid_seed, rate, "grid", chosen)
            for label in rates
            for rate in comparison.learning_rates
        ]
        rates = _best_rates(grid, train_all(grid))
    directory.write(chosen_learning_rate=rates)
    train_all(
        [directory.job(label, seed, rates[label], "final", chosen) for seed in comparison.seeds for label in rates]
    )


def default_jobs(device: str, parameters: int) -> int:
    """Return how many runs to train at a time.

    Small models leave most of a core idle waiting for another, so each gets one core to itself.
    """
    return available_cores() if device == "cpu" and parameters < SMALL_MODEL else 1


def slug(name: str) -> str:
    """Return a directory name for a model name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", name)


class _Directory:
    """The directory of a comparison: compare.json, and under runs/ one directory per run."""

    def __init__(self, out: Path, comparison: Comparison, data_sha256: str):
        """Make `out` this comparison's own, or go on with what an earlier start of it wrote.

        Raises:
            LeanError: `out` holds something else.
        """
        check_place(out)
        self.out, self.comparison, self.data_sha256 = out, comparison, data_sha256
        wanted, file = self._plan(), out / COMPARISON
        if file.exists():
            self.content = read_json(file)
            # A key that an earlier version did not write yet says nothing against it.
            compared = wanted.keys() & self.content.keys() - {"command", "title", "notes"}
            different = [key for key in wanted if key in compared and self.content[key] != wanted[key]]
            if different:
                shown = "; ".join(f"{key}: {self.content[key]} there, {wanted[key]} asked" for key in different)
                raise LeanError(f"{out} holds another comparison ({shown}); choose another --out or delete it")
            return
        if out.exists() and any(out.iterdir()):
            raise LeanError(f"{out} is not empty and not a comparison; choose another --out")
        make_directory(out)
        self.content = wanted
        self.write()

    def _plan(self) -> dict[str, Any]:
        """compare.json as it is before anything has run."""
        comparison = self.comparison
        entries, rates = comparison.entries, comparison.learning_rates
        return {name: getattr(comparison, name) for name in RECORDED} | {
            "baseline": next(iter(entries)),
            "architectures": list(entries),
            "groups": [[entry.label for entry in group] for group in comparison.groups],
            "entries": {
                label: {"model": entry.model, "recipe": dict(entry.recipe), "row": entry.row}
                for label, entry in entries.items()
            },
            "seeds": list(comparison.seeds),
            "grid": {"seed": comparison.grid_seed, "learning_rates": list(rates)} if rates else None,
            "recipe": dict(comparison.recipe),
            "data_sha256": self.data_sha256,
            "notes": list(comparison.notes),
        }

    def write(self, **changes: Any) -> None:
        self.content |= changes
        write_json(self.out / COMPARISON, self.content)

    def settle_micro_batch(
        self, asked: Precision | None, device: str, workers: int, on_message: Callable[[str], None]
    ) -> None:
        """Set the micro-batch of every run: the one asked for, else the one begun with, else what fits for every model.

        Runs that an earlier version began without one take whole batches.
        """
        comparison, context_length = self.comparison, self.comparison.context_length
        if comparison.micro_batch_size is not None:
            return
        if "chosen_micro_batch_size" not in self.content and "precision" not in self.content:
            assert context_length is not None
            recipes = {label: entry.full_recipe(comparison.recipe) for label, entry in comparison.entries.items()}
            steps = [
                Step(preset(entry.model), recipes[label].batch_size, context_length, device, asked)
                for label, entry in comparison.entries.items()
            ]
            chosen = choose_micro_batch(steps, free_memory(device) // workers)
            on_message(str(chosen))
            self.write(chosen_micro_batch_size=chosen.size)
        chosen_size = self.content.get("chosen_micro_batch_size")
        self.comparison = replace(comparison, micro_batch_size=chosen_size)

    def settle_precision(self, asked: Precision | None, device: str, on_message: Callable[[str], None]) -> Precision:
        """Return the precision of every run: the one begun in, else the one asked for, else the baseline's fastest."""
        if "precision" not in self.content:
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
            self.write(precision=chosen.record())
        record = self.content["precision"]
        begun = parse_precision(record["choice"])
        if begun is None:
            raise LeanError(f"{self.out / COMPARISON} names no precision that was chosen, found {record['choice']!r}")
        if asked is not None and asked != begun:
            raise LeanError(f"{self.out} was begun in {begun}, {asked} is asked; choose another --out or delete it")
        return replace(begun, timings=record["milliseconds_per_step"])

    def job(self, label: str, seed: int, learning_rate: float, role: str, precision: Precision) -> Job:
        entry = self.comparison.entries[label]
        spec = RunSpec(
            **{setting.name: getattr(self.comparison, setting.name) for setting in fields(RunSettings)},
            name=label,
            config=preset(entry.model).as_overrides(),
            recipe=entry.full_recipe({**self.comparison.recipe, "learning_rate": learning_rate}),
            seed=seed,
            precision=str(precision),
            precision_timings=precision.timings,
            data_sha256=self.data_sha256,
            role=role,
        )
        return Job(spec, self.out / "runs" / f"{slug(label)}-{role}-lr{learning_rate:g}-seed{seed}")


def _best_rates(grid: Sequence[Job], records: Mapping[Path, Mapping[str, Any]]) -> dict[str, float]:
    """Return each architecture's learning rate of lowest validation loss."""
    losses: dict[str, dict[float, float]] = {job.spec.name: {} for job in grid}
    for job in grid:
        if (final := records[job.out]["final"]) is not None:
            losses[job.spec.name][job.spec.recipe.learning_rate] = final["validation_loss"]
    for label, tried in losses.items():
        if not tried:
            raise LeanError(f"{label} diverged at every learning rate of the grid; try smaller ones")
    return {label: min(tried, key=tried.__getitem__) for label, tried in losses.items()}


def _run_jobs(
    jobs: Sequence[Job],
    data: Data,
    settings: dict[str, Any],
    workers: int,
    threads: int,
    on_update: Callable[[Update], None],
) -> dict[Path, dict[str, Any]]:
    """Run the jobs here one after another, or in `workers` processes; return their records by directory."""
    records: dict[Path, dict[str, Any]] = {}

    def progress(job: Job, step: int, steps: int, loss: float | None, rate: float | None) -> None:
        if job.out not in records:  # the queue may deliver a step after the end
            on_update(Update(job, step, loss, rate))

    def finish(job: Job, record: dict[str, Any]) -> None:
        records[job.out] = record
        on_update(Update(job, job.spec.recipe.steps, record=record))

    if workers == 1:
        for job in jobs:
            finish(job, train(job.spec, data, job.out, progress=partial(progress, job), **settings))
        return records
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the workers read it when they load torch
    # Where all of these processes are killed, the one that cleans up after them has nothing to warn about.
    filters = filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys(filters))
    steps = context.Queue()
    with ProcessPoolExecutor(workers, context, _start_worker, (threads, steps)) as pool:
        others = multiprocessing.active_children()
        with _children_ignore_interrupts():
            pending = {pool.submit(_work, index, job, data, settings): job for index, job in enumerate(jobs)}
        try:
            while pending:
                done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not steps.empty():
                    index, *figures = steps.get()
                    progress(jobs[index], *figures)
                for future in done:
                    finish(pending.pop(future), future.result())
        except BrokenProcessPool:
            raise LeanError(
                "a training process died, out of memory perhaps; run the same command again to go on, with --jobs 1"
            ) from None
        finally:
            # After an error or Ctrl-C: the pool would wait until all runs under way have ended.
            for process in set(multiprocessing.active_children()) - set(others) if pending else ():
                process.terminate()
    return records


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Let processes started in the body ignore Ctrl-C, which a terminal sends to all: this one ends them."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


_steps: Any = None  # in a worker: the queue on which it reports its steps


def _start_worker(threads: int, steps: Any) -> None:
    global _steps
    _steps = steps
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the process that started it is killed: it must not write where the next one will."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(index: int, job: Job, data: Data, settings: dict[str, Any]) -> dict[str, Any]:
    return train(job.spec, data, job.out, progress=lambda *figures: _steps.put((index, *figures)), **settings)
