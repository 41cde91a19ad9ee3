"""A comparison on several machines: a seed stays on the machine and in the precision that it was begun in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..environment import place_of, same_place
from ..train.directory import begun_run
from .jobs import PlannedRun

Hardware = Mapping[str, Any]


def as_begun(job: PlannedRun) -> PlannedRun:
    """Return a run in the precision that it was begun in."""
    begun = begun_run(job.out)
    return job if begun is None else _in_precision(job, begun)


def to_train_here(
    finals: Sequence[PlannedRun], here: Hardware | None, elsewhere: bool, on_message: Callable[[str], None]
) -> list[PlannedRun]:
    """Return the final runs that can be trained here, in the precision that their seed was begun in.

    What is missing of a seed that was begun on another machine waits until the comparison goes on there: a pair of runs
    is of one machine.

    Args:
        here: the machine, as records name it; None: not known, everything is trained.
        elsewhere: a cluster, of whose machines `here` is one; it only tells CPUs from accelerators.
    """
    begun = {job.out: run for job in finals if (run := begun_run(job.out)) is not None}
    first = _first_of_seeds(finals, begun)
    jobs, waiting = [], []
    for job in finals:
        run, of_seed = begun.get(job.out, {}), first.get(job.spec.seed, {})
        finished = "final" in run
        if not finished and not _fits(of_seed.get("hardware"), here, elsewhere):
            waiting.append(job)
            continue
        known = run if finished or "hardware" in run else of_seed
        jobs.append(_in_precision(job, known) if known else job)
    for seed in dict.fromkeys(job.spec.seed for job in waiting):
        count = sum(job.spec.seed == seed for job in waiting)
        on_message(
            f"seed {seed} was begun on {place_of(first[seed]['hardware'])}: {count} of its runs wait for that machine; "
            f"to train the seed here, remove runs/*-final-*-seed{seed}"
        )
    return jobs


def _fits(there: Hardware | None, here: Hardware | None, elsewhere: bool) -> bool:
    """Whether what was begun there can be gone on with here."""
    if there is None or here is None:
        return True
    return (there["device"] == "cpu") == (here["device"] == "cpu") if elsewhere else same_place(there, here)


def _first_of_seeds(finals: Sequence[PlannedRun], begun: Mapping[Path, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what decides over the other runs of a seed: one that was trained on, else one that was only asked for."""
    runs = [(job.spec.seed, begun[job.out]) for job in finals if job.out in begun]
    runs.sort(key=lambda run: "hardware" not in run[1])
    return dict(reversed(runs))


def _in_precision(job: PlannedRun, begun: Mapping[str, Any]) -> PlannedRun:
    """A run in the precision of a record, or of a specification."""
    precision = begun["precision"]
    choice = precision["choice"] if isinstance(precision, dict) else precision
    return PlannedRun(replace(job.spec, precision=choice), job.out, job.initial)
