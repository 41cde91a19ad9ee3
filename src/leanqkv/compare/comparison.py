"""Runs a comparison: every architecture on every seed, on the same batches, several runs at a time on a CPU."""

import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..environment import available_cores, check_device, default_device
from ..errors import LeanError
from ..files import read_json, write_json
from ..presets import preset
from ..train import Precision, RunSpec, choose_precision, parse_precision, train
from ..train.tasks import Data, check_fit
from .suite import Entry, Group, check_groups

COMPARISON = "compare.json"
# Above this many parameters a CPU is used better by one run on all cores than by one run a core.
SMALL_MODEL = 20_000_000


@dataclass(frozen=True)
class Comparison:
    """What is compared: in each group the first entry is the baseline of the others.

    Attributes:
        learning_rates: the grid to search, for each architecture by itself, on a seed of its own; None: the rates of
            the recipes.
        recipe: what a person asked for in place of every architecture's own recipe.
        suite, scale: of a suite, its name and scale.
        notes: what the report is to say of it.

    Raises:
        LeanError: two entries of one name, or a recipe for all where the entries differ in just that.
    """

    title: str
    groups: tuple[Group, ...]
    seeds: tuple[int, ...]
    recipe: Mapping[str, Any]
    command: str
    suite: str | None = None
    scale: str | None = None
    notes: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] | None = None
    context_length: int | None = None
    evaluation_sequences: int = 128
    evaluate_every: int = 50
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_groups(self.groups, {*self.recipe, *(("learning_rate",) if self.learning_rates else ())})

    @property
    def entries(self) -> dict[str, Entry]:
        """By label, the first baseline first."""
        return {entry.label: entry for group in self.groups for entry in group}

    @property
    def grid_seed(self) -> int:
        """A seed that no reported run uses: the rates are not chosen on the runs they are reported for."""
        return max(self.seeds) + 1


@dataclass(frozen=True)
class Job:
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
    """Trains what is not trained yet; `out` then holds compare.json and one directory per run under runs/.

    Args:
        precision: "auto" times the candidates on the baseline once; every run then uses the same one.
        jobs: runs at a time. Default: on a CPU one for each core if the models are small, else one.
        on_message, on_jobs, on_update: what happens, for a progress display.

    Raises:
        LeanError: names or data that do not fit, or `out` holding another comparison.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LeanError("a comparison starts its own processes; under torchrun use `leanqkv train` for each model")
    device = check_device(device or default_device())
    entries = comparison.entries
    configs = {name: preset(entry.model) for name, entry in entries.items()}
    recipes = {name: entry.full_recipe(comparison.recipe) for name, entry in entries.items()}
    context = comparison.context_length or min(config.max_position_embeddings for config in configs.values())
    for name, config in configs.items():
        check_fit(name, config, data, context)
    baseline = next(iter(entries))
    runs = len(configs) * len(comparison.seeds)
    largest = max(config.plan.count_parameters().total for config in configs.values())
    workers = min(runs, jobs or default_jobs(device, largest))
    asked = parse_precision(precision)
    about = _claim(out, comparison, context, data)
    # Kept, because sums in another number of threads round differently: a run goes on as it began.
    about.setdefault("threads", max(1, available_cores() // workers) if device == "cpu" else torch.get_num_threads())
    threads = about["threads"]
    torch.set_num_threads(threads)
    if "precision" not in about:
        chosen = asked or choose_precision(
            configs[baseline],
            batch_size=comparison.micro_batch_size or recipes[baseline].batch_size,
            context_length=context,
            steps=recipes[baseline].steps,
            device=device,
            progress=on_message,
        )
        about["precision"] = chosen.record()
        write_json(out / COMPARISON, about)
    precision_record = about["precision"]
    chosen = replace(_parse(precision_record["choice"]), timings=precision_record["milliseconds_per_step"])
    if asked is not None and asked != chosen:
        raise LeanError(f"{out} was begun in {chosen}, {asked} is asked; choose another --out or delete it")

    def job(name: str, seed: int, learning_rate: float, role: str) -> Job:
        spec = RunSpec(
            name=name,
            config=configs[name].as_overrides(),
            recipe=entries[name].full_recipe({**comparison.recipe, "learning_rate": learning_rate}),
            seed=seed,
            context_length=context,
            precision=str(chosen),
            precision_timings=chosen.timings,
            data_sha256=data.sha256,
            micro_batch_size=comparison.micro_batch_size,
            evaluation_sequences=comparison.evaluation_sequences,
            evaluate_every=comparison.evaluate_every,
            role=role,
        )
        return Job(spec, out / "runs" / f"{slug(name)}-{role}-lr{learning_rate:g}-seed{seed}")

    def run(todo: list[Job]) -> dict[Path, dict[str, Any]]:
        on_jobs(todo)
        settings = {"device": device, "batches": out / "batches"}
        return _run_jobs(todo, data, settings, workers, threads, on_update)

    rates = {name: recipes[name].learning_rate for name in configs}
    if comparison.learning_rates:
        grid = [job(name, comparison.grid_seed, rate, "grid") for name in configs for rate in comparison.learning_rates]
        found = run(grid)
        for name in configs:
            losses = {
                j.spec.recipe.learning_rate: record["final"]["validation_loss"]
                for j in grid
                if j.spec.name == name and (record := found[j.out])["final"] is not None
            }
            if not losses:
                raise LeanError(f"{name} diverged at every learning rate of the grid; try smaller ones")
            rates[name] = min(losses, key=losses.__getitem__)
    about["chosen_learning_rate"] = rates
    write_json(out / COMPARISON, about)
    run([job(name, seed, rates[name], "final") for seed in comparison.seeds for name in configs])


def default_jobs(device: str, parameters: int) -> int:
    """Runs at a time: small models leave most of a core idle waiting for another, so each gets one core to itself."""
    return available_cores() if device == "cpu" and parameters < SMALL_MODEL else 1


def slug(name: str) -> str:
    """A directory name for a model name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", name)


def _parse(choice: str) -> Precision:
    precision = parse_precision(choice)
    if precision is None:
        raise LeanError(f"{COMPARISON} names no precision that was chosen, found {choice!r}")
    return precision


def _claim(out: Path, comparison: Comparison, context: int, data: Data) -> dict[str, Any]:
    """Makes `out` this comparison's own, or finds what an earlier start of it wrote."""
    entries = comparison.entries
    wanted = {
        "title": comparison.title,
        "suite": comparison.suite,
        "scale": comparison.scale,
        "command": comparison.command,
        "baseline": next(iter(entries)),
        "architectures": list(entries),
        "groups": [[entry.label for entry in group] for group in comparison.groups],
        "entries": {
            label: {"model": entry.model, "recipe": dict(entry.recipe), "row": entry.row}
            for label, entry in entries.items()
        },
        "seeds": list(comparison.seeds),
        "grid": {"seed": comparison.grid_seed, "learning_rates": list(comparison.learning_rates)}
        if comparison.learning_rates
        else None,
        "recipe": dict(comparison.recipe),
        "context_length": context,
        "evaluation_sequences": comparison.evaluation_sequences,
        "evaluate_every": comparison.evaluate_every,
        "micro_batch_size": comparison.micro_batch_size,
        "data_sha256": data.sha256,
        "notes": list(comparison.notes),
    }
    file = out / COMPARISON
    if file.exists():
        found = read_json(file)
        # What an earlier version did not write yet says nothing against it.
        told = [key for key in wanted if key in found and key not in ("command", "title", "notes")]
        different = [key for key in told if found[key] != wanted[key]]
        if different:
            shown = "; ".join(f"{key}: {found.get(key)} there, {wanted[key]} asked" for key in different)
            raise LeanError(f"{out} holds another comparison ({shown}); choose another --out or delete it")
        return found
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LeanError(f"{out} is not empty and not a comparison; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, wanted)
    return wanted


def _run_jobs(
    jobs: Sequence[Job],
    data: Data,
    settings: dict[str, Any],
    workers: int,
    threads: int,
    on_update: Callable[[Update], None],
) -> dict[Path, dict[str, Any]]:
    """Runs the jobs here one after another, or in `workers` processes, and returns their records by directory."""
    records: dict[Path, dict[str, Any]] = {}

    def note(update: Update) -> None:
        if update.job.out in records:
            return  # a step that was reported after the end
        if update.record is not None:
            records[update.job.out] = update.record
        on_update(update)

    if workers == 1:
        for job in jobs:

            def progress(step: int, steps: int, loss: float | None, rate: float | None, job: Job = job) -> None:
                note(Update(job, step, loss, rate))

            record = train(job.spec, data, job.out, progress=progress, **settings)
            note(Update(job, job.spec.recipe.steps, record=record))
        return records
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the workers read it when they load torch
    steps = context.Queue()
    with ProcessPoolExecutor(workers, context, _start_worker, (threads, steps)) as pool:
        pending = {pool.submit(_work, index, job, data, settings): job for index, job in enumerate(jobs)}
        try:
            while pending:
                done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not steps.empty():
                    index, *figures = steps.get()
                    note(Update(jobs[index], *figures))
                for future in done:
                    job = pending.pop(future)
                    note(Update(job, job.spec.recipe.steps, record=future.result()))
        except BrokenProcessPool:
            raise LeanError(
                "a training process died, out of memory perhaps; run the same command again to go on, with --jobs 1"
            ) from None
        finally:
            for future in pending:
                future.cancel()
    return records


_steps: Any = None  # in a worker: the queue on which it reports its steps


def _start_worker(threads: int, steps: Any) -> None:
    global _steps
    _steps = steps
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker ends when the process that started it is killed: it must not write where the next one will."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(index: int, job: Job, data: Data, settings: dict[str, Any]) -> dict[str, Any]:
    def progress(step: int, steps: int, loss: float | None, rate: float | None) -> None:
        _steps.put((index, step, loss, rate))

    return train(job.spec, data, job.out, progress=progress, **settings)
