"""Jobs: directories of work that one process at a time claims, continues after an interruption, and finishes."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from filelock import FileLock, Timeout

from .errors import LeanError, UnreachableError
from .files import check_place, make_directory, read_json, remove, write_json
from .records import Shape, read_record

LOCK, PATIENCE = ".lock", 5.0  # seconds
FOREVER = -1.0
SHOWN = 5  # differences of a job, in an error
# By what a directory holds: the file with its specification, and the words about a directory that holds anything else.
KINDS = {
    "run": ("run.json", "is not empty and not a run of leanqkv; choose another `out`"),
    "comparison": ("compare.json", "is not empty and not a comparison; choose another `out`"),
    "frontier": ("job.json", "exists, is not empty and holds no frontier; choose another `out`"),
}


class Job:
    """Work in `directory`. One JSON file there holds its specification and, beside it, facts that it has found.

    Args:
        spec: everything that decides the result.
        file: name of that file.

    Attributes:
        content: of the file, as it was last read or written.
    """

    def __init__(self, directory: Path, spec: Mapping[str, Any], file: str = "job.json"):
        self.directory, self.file = directory, directory / file
        self.spec: dict[str, Any] = json.loads(json.dumps(spec))
        self.content = dict(self.spec)

    def resume(self) -> bool:
        """Whether an earlier start of the same job has left its file; `content` is then that of the file."""
        with suppress(LeanError):
            there = read_json(self.file)
            if self.spec.items() <= there.items():
                self.content = there
                return True
        return False

    def claim(
        self,
        kind: str,
        shape: Shape = dict,
        again: str = "",
        ignored: Iterable[str] = (),
        grows: Callable[[Sequence[str], Mapping[str, Any]], bool] = lambda different, there: False,
    ) -> bool:
        """Read what an earlier start has left, if there is anything, and return whether there is. Write nothing.

        Args:
            kind: one of KINDS.
            shape, again: of the file, as `read_record` takes them.
            ignored: fields of the specification that may differ; those of the earlier start stay.
            grows: whether this job may take over from one that differs in these fields.

        Raises:
            LeanError: the directory holds something else, or a job of another specification.
        """
        check_out(self.directory, kind)
        if not self.file.exists():
            return False
        there = read_record(self.file, shape, again)
        different = [name for name in self.spec if name not in ignored and there.get(name) != self.spec[name]]
        if different and not grows(different, there):
            lines = [line for name in different for line in _unlike(name, there.get(name), self.spec[name])]
            shown = "; ".join([*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])])
            raise LeanError(f"{self.directory} holds another {kind} ({shown}); choose another `out` or delete it")
        self.content = there | (self.spec if different else {})
        return True

    def write(self, **facts: Any) -> None:
        """Write the file with these facts, and make the directory if there is none."""
        self.content |= facts
        make_directory(self.directory)
        write_json(self.file, self.content)

    def start(self, keep: Iterable[str] = ()) -> None:
        """Write the file, and remove everything beside it but the lock and the files to `keep` of the same job."""
        kept = {self.file.name, LOCK, *(keep if self.resume() else ())}
        for path in self.directory.iterdir():
            if path.name not in kept:
                remove(path)
        self.write()

    def publish(self, out: Path) -> None:
        """Give the finished directory its name, `out`, which is absent or empty."""
        self.file.unlink()
        (self.directory / LOCK).unlink(missing_ok=True)
        if out.exists():
            out.rmdir()
        self.directory.replace(out)


def _unlike(name: str, there: Any, asked: Any) -> Iterator[str]:
    """Yield what differs; of objects the fields that do."""
    if isinstance(there, dict) and isinstance(asked, dict):
        for field in there | asked:
            if there.get(field) != asked.get(field):
                yield from _unlike(f"{name}.{field}", there.get(field), asked.get(field))
    else:
        yield f"{name}: {_short(there)} there, {_short(asked)} asked"


def _short(value: Any) -> str:
    return shorten(json.dumps(value), 80)


def check_out(out: Path, kind: str, *sources: Path | None) -> None:
    """Check that a job of KINDS can be started or continued in `out`.

    Raises:
        LeanError: `out` cannot be a directory, lies in a source, or holds something else.
    """
    check_place(out, *sources)
    own, refusal = KINDS[kind]
    if out.exists() and not (out / own).exists() and any(not file.name.startswith(".") for file in out.iterdir()):
        raise LeanError(f"{out} {refusal}")


def check_out_early(out: Path, kind: str, *sources: Path | None) -> None:
    """Check the same before anything is loaded. Of several processes the first one does so later, for all."""
    if "RANK" not in os.environ:
        check_out(out, kind, *sources)


def beside(out: Path, ending: str) -> Path:
    """Return the place of unfinished work on `out`."""
    return out.with_name(f".{out.name}.{ending}")


@contextmanager
def unfinished(out: Path, ending: str, doing: str, patience: float | None = None) -> Iterator[Path]:
    """Lock and yield a directory beside `out` for unfinished work. An interruption leaves it to the next start.

    A LeanError, which the next start would meet again, removes it and the directories that were made for it.
    """
    directory = beside(out, ending)
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    make_directory(directory)
    with locked(directory, doing, patience):
        try:
            yield directory
        except UnreachableError:
            raise
        except LeanError:
            remove(directory)
            with suppress(OSError):  # not empty: another process writes there
                for each in made[1:]:
                    each.rmdir()
            raise


@contextmanager
def locked(directory: Path, doing: str, patience: float | None = None) -> Iterator[None]:
    """Lock `directory` against other processes that are `doing` the same; the lock's file goes at the end.

    Raises:
        LeanError: another process keeps it for `patience` seconds: one whose parent was killed takes a moment to end.
    """
    while True:
        lock = FileLock(directory / LOCK, timeout=PATIENCE if patience is None else patience)
        try:
            lock.acquire()
            break
        except Timeout:
            raise LeanError(f"another process is {doing} in {directory}; wait for it, or stop it first") from None
        except FileNotFoundError:  # the process that this one waited for has given the directory its name
            make_directory(directory)
    try:
        yield
    finally:
        (directory / LOCK).unlink(missing_ok=True)
        lock.release()


def is_locked(directory: Path) -> bool:
    """Whether a process has locked `directory`, of this machine or of another one that shares its disk."""
    if not (directory / LOCK).exists():
        return False
    try:
        with FileLock(directory / LOCK, timeout=0):
            return False
    except Timeout:
        return True
