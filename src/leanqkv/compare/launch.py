"""Runs of a comparison as jobs of a cluster, by submitit: SLURM's, or processes of this machine."""

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..errors import LeanError
from ..files import write_json
from ..job import is_locked
from ..records import read_record
from ..train.directory import claim, complete_checkpoints
from ..train.tasks import Data
from ..workers import children_ignore_interrupts, end_with_parent
from .jobs import PlannedRun, Update

# Where submitit writes what jobs print, and which job trains which run, in the comparison's directory.
JOBS, STARTED = "jobs", "started.json"
FORGET = "remove it when none of the jobs runs any more"
SECONDS = 1.0
# A job that dies so often without a checkpoint between is not started again.
MOST_DEATHS = 3


@dataclass(frozen=True)
class Cluster:
    """Where the jobs of a comparison run, and what each of them gets.

    Attributes:
        kind: "slurm", or "local" for processes of this machine.
        hours: of a job, after which it is stopped and started again.
        gpus, cpus, memory_gb: of a job. Each GPU has a process of its own, with which it trains the run.
        options: further parameters of SLURM by name, such as "partition" and "account".

    Raises:
        LeanError: submitit is not installed, or there is no such cluster.
    """

    kind: str = "slurm"
    hours: float = 24.0
    gpus: int = 1
    cpus: int = 8
    memory_gb: float | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("submitit") is None:
            raise LeanError("`launcher=submitit` needs submitit: pip install 'leanqkv[cluster]'")
        if self.kind not in ("slurm", "local"):
            raise LeanError(f"`cluster` is slurm or local, found {self.kind!r}")
        if self.kind == "slurm" and shutil.which("srun") is None:
            raise LeanError("`cluster=slurm`: there is no srun here; start the command where jobs are submitted")

    @property
    def elsewhere(self) -> bool:
        """Whether jobs run on other machines than this one."""
        return self.kind != "local"


class InJob:
    """A function that runs in a job, and again in another one where that is stopped by the cluster.

    With `processes` that many call it, connected as those of torchrun are; the first one's result counts.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, processes: int | None = None):
        self.call, self.processes = (function, arguments), processes

    def __call__(self) -> tuple[Any, str | None]:
        """Return what the function returns, or its LeanError in words."""
        if self.processes is None:
            return _answer(*self.call)
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            *(1, 1, self.processes),
            rdzv_endpoint="localhost:0",
            rdzv_backend="c10d",
            run_id=uuid4().hex,
            max_restarts=0,
            monitor_interval=SECONDS,
        )
        try:
            return elastic_launch(config, _in_process)(*self.call)[0]
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            sys.exit(1)  # as if it had died itself, so that another job goes on

    def checkpoint(self) -> Any:
        """Return what submitit is to submit where the job has to make room, or its time is up."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _answer(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str | None]:
    try:
        return function(*arguments), None
    except LeanError as error:
        return None, str(error)


def _in_process(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str | None]:
    """Call a function in one process of several. An error of the first one ends the others by SystemExit."""
    end_with_parent()
    try:
        return _answer(function, arguments)
    except SystemExit:
        return None, None


class Launcher:
    """Submits functions as jobs, whose files are under `out`."""

    def __init__(
        self, cluster: Cluster, out: Path, shard: str | None = None, on_message: Callable[[str], None] = print
    ):
        """Submit nothing yet."""
        import submitit

        self.cluster, self.folder, self.on_message = cluster, out / JOBS, on_message
        self.processes = max(1, cluster.gpus) if cluster.gpus > 1 or shard is not None else None
        self.executor = submitit.AutoExecutor(self.folder, cluster=cluster.kind)
        settings: dict[str, Any] = {"timeout_min": max(1, round(60 * cluster.hours)), "name": f"leanqkv-{out.name}"}
        if cluster.kind == "slurm":
            settings |= {"tasks_per_node": 1, "gpus_per_node": cluster.gpus, "cpus_per_task": cluster.cpus}
            settings |= {} if cluster.memory_gb is None else {"mem_gb": cluster.memory_gb}
            settings["slurm_additional_parameters"] = dict(cluster.options)
        self.executor.update_parameters(**settings)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with children_ignore_interrupts():  # jobs of this machine go on after Ctrl-C, as those of another one do
            return self.executor.submit(InJob(function, *arguments, processes=self.processes))

    def wait_for(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns in a job.

        Raises:
            LeanError: as the function, or the job died.
        """
        handle = self._submit(function, *arguments)
        while not handle.done():
            time.sleep(SECONDS)
        return _result(handle)

    def run(
        self,
        jobs: Sequence[PlannedRun],
        data: Data,
        settings: dict[str, Any],
        at_once: int,
        on_update: Callable[[Update], None],
    ) -> dict[Path, dict[str, Any]]:
        """Train every run that has no record in a job of its own, and return the records by directory.

        Args:
            settings: of `PlannedRun.train`.
            at_once: how many jobs wait or run at a time.

        Raises:
            LeanError: of a run; the jobs of the others go on.
        """
        records: dict[Path, dict[str, Any]] = {}
        deaths: dict[Path, tuple[int, int]] = {}
        handles = self._earlier(jobs)
        todo = list(jobs)
        while todo:
            for job in todo[:at_once]:
                handle = handles.get(job.out)
                if (handle is not None and not handle.done()) or is_locked(job.out):  # waits, or is trained
                    on_update(Update(job, _last_step(job.out)))
                    continue
                if (record := claim(job.out, job.spec)) is not None:
                    records[job.out] = record
                    on_update(Update(job, job.spec.recipe.steps, record=record))
                    todo.remove(job)
                    continue
                if handle is not None:
                    self._note_death(job, handle, deaths)
                handles[job.out] = self._submit(partial(job.train, data, **settings))
                self._store(handles)
            if todo:
                time.sleep(SECONDS)
        return records

    def _note_death(self, job: PlannedRun, handle: Any, deaths: dict[Path, tuple[int, int]]) -> None:
        """Say that a job died and is started again, unless that is hopeless."""
        log = handle.paths.stderr
        if handle.paths.result_pickle.exists():
            _result(handle)
        step = _last_step(job.out)
        before, count = deaths.get(job.out, (-1, 0))
        deaths[job.out] = (step, count + 1 if step == before else 1)
        if deaths[job.out][1] >= MOST_DEATHS:
            raise LeanError(f"the job of {job.out.name} died {MOST_DEATHS} times at step {step:,}; {log} says why")
        self.on_message(f"the job of {job.out.name} died; another one goes on from step {step:,}")

    def _earlier(self, jobs: Sequence[PlannedRun]) -> dict[Path, Any]:
        """Return the jobs of an earlier start of this command that still wait or run; why others ended is past.

        Those of this machine are not known to another process: while one trains, its run is locked.
        """
        import submitit

        started = self._started() if self.cluster.elsewhere else {}
        named = [job.out for job in jobs if job.out.name in started]
        handles: dict[Path, Any] = {out: submitit.SlurmJob(self.folder, started[out.name]) for out in named}
        return {out: handle for out, handle in handles.items() if not handle.done()}

    def _store(self, handles: Mapping[Path, Any]) -> None:
        """Add jobs to those that are kept; those of other runs, which may wait, stay."""
        numbers = {out.name: handle.job_id for out, handle in handles.items()}
        write_json(self.folder / STARTED, self._started() | numbers)

    def _started(self) -> dict[str, str]:
        """Return the number of the last job of each run, by the name of its directory."""
        file = self.folder / STARTED
        return read_record(file, {str: str}, FORGET) if file.exists() else {}


def _last_step(out: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max(complete_checkpoints(out), default=0)


def _result(handle: Any) -> Any:
    try:
        value, error = handle.result()
    except Exception as died:  # whatever it was, its log says
        raise LeanError(f"a job died ({type(died).__name__}); {handle.paths.stderr} says why") from None
    if error is not None:
        raise LeanError(error)
    return value
