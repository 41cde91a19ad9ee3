"""Runs of a comparison side by side, in processes of this machine."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import LeanError
from ..train.spec import RunSpec
from ..train.tasks import Data
from ..train.training import train
from ..workers import children_ignore_interrupts, end_with_parent


@dataclass(frozen=True)
class PlannedRun:
    """A run to be trained, and its directory; `initial` is the checkpoint that it starts from, if any."""

    spec: RunSpec
    out: Path
    initial: Path | None = None

    def train(self, data: Data, threads: int, **settings: Any) -> dict[str, Any]:
        """Train it, or go on, in so many threads and with these settings of `train`, and return its record."""
        torch.set_num_threads(threads)
        return train(self.spec, data, self.out, initial=self.initial, **settings)


@dataclass(frozen=True)
class Update:
    """One run's progress; `record` once it is done."""

    job: PlannedRun
    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    record: dict[str, Any] | None = None


def run_jobs(
    jobs: Sequence[PlannedRun], data: Data, settings: dict[str, Any], workers: int, on_update: Callable[[Update], None]
) -> dict[Path, dict[str, Any]]:
    """Run the jobs here one after another, or in `workers` processes; return their records by directory.

    settings: of `PlannedRun.train`.
    """
    records: dict[Path, dict[str, Any]] = {}

    def progress(job: PlannedRun, step: int, steps: int, loss: float | None, rate: float | None) -> None:
        if job.out not in records:  # the queue may deliver a step after the end
            on_update(Update(job, step, loss, rate))

    def finish(job: PlannedRun, record: dict[str, Any]) -> None:
        records[job.out] = record
        on_update(Update(job, job.spec.recipe.steps, record=record))

    if workers == 1:
        for job in jobs:
            finish(job, job.train(data, progress=partial(progress, job), **settings))
        return records
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])  # the workers read it when they load torch
    # Where all of these processes are killed, the one that cleans up after them has nothing to warn about.
    filters = filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys(filters))
    steps = context.Queue()
    with ProcessPoolExecutor(workers, context, _start_worker, (steps,)) as pool:
        others = multiprocessing.active_children()
        with children_ignore_interrupts():
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
                "a training process died, out of memory perhaps; run the same command again to go on, with `jobs=1`"
            ) from None
        finally:
            # After an error or Ctrl-C: the pool would wait until all runs under way have ended.
            for process in set(multiprocessing.active_children()) - set(others) if pending else ():
                process.terminate()
    return records


_steps: Any = None  # in a worker: the queue on which it reports its steps


def _start_worker(steps: Any) -> None:
    global _steps
    _steps = steps
    end_with_parent()  # it must not write where the next one will


def _work(index: int, job: PlannedRun, data: Data, settings: dict[str, Any]) -> dict[str, Any]:
    return job.train(data, progress=lambda *figures: _steps.put((index, *figures)), **settings)
