"""The directory of a run: its owner, its checkpoints, and the files put there at the end."""

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from ..errors import LeanError
from ..files import read_json, write_json
from .processes import first_decides
from .spec import RunSpec
from .tasks import TrainingTask

RECORD = "record.json"
SPEC = "run.json"
# Written into a checkpoint last; a checkpoint without it was cut off and is never picked up.
COMPLETE = "complete"


@contextmanager
def only_here(out: Path) -> Iterator[None]:
    """Lock `out` against a second process on the same run; the processes of torchrun are one."""
    lock = FileLock(out / ".lock", timeout=0)

    def acquire() -> None:
        try:
            lock.acquire()
        except Timeout:
            raise LeanError(f"another process is training in {out}; wait for it, or stop it first") from None

    first_decides(acquire)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_full_is_an_error(out: Path) -> Iterator[None]:
    """Turn every library's own error about a full disk into one line."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if full or shutil.disk_usage(out).free < 2**20:  # torch.save only says that a position was not the expected one
            raise LeanError(
                f"the disk is full: {out} could not be written; make room and run the same command again, it goes on "
                "from the last checkpoint"
            ) from error
        raise


def check_out(out: Path) -> None:
    """Check that a run can be started or continued in `out`.

    Raises:
        LeanError: `out` holds something that is not a run.
    """
    if (out / SPEC).exists() or not out.exists():
        return
    if not out.is_dir() or any(not file.name.startswith(".") for file in out.iterdir()):
        raise LeanError(f"{out} is not empty and not a run of leanqkv; choose another --out")


def claim(out: Path, spec: RunSpec) -> dict[str, Any] | None:
    """Write the specification to `out`, or compare it with the one there; return the record of a finished run.

    Raises:
        LeanError: `out` holds another run, or something that is not a run.
    """
    if not (out / SPEC).exists():
        check_out(out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / SPEC, spec.as_json())
        return None
    earlier, wanted = read_json(out / SPEC), spec.as_json()
    differences = [
        f"{key}: {shorten(json.dumps(earlier.get(key)), 80)} there, {shorten(json.dumps(value), 80)} asked"
        for key, value in wanted.items()
        if key != "precision_timings" and earlier.get(key) != value
    ]
    if differences:
        raise LeanError(f"{out} holds another run ({'; '.join(differences)}); choose another --out or delete it")
    return read_json(out / RECORD) if (out / RECORD).exists() else None


def last_checkpoint(out: Path) -> str | None:
    """Return the newest complete checkpoint; remove those that were cut off."""
    complete = []
    for checkpoint in out.glob("checkpoint-*"):
        if (checkpoint / COMPLETE).exists():
            complete.append(checkpoint)
        else:
            shutil.rmtree(checkpoint)
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def finish(
    out: Path, model: PreTrainedModel, task: TrainingTask, record: dict[str, Any], keep_checkpoints: bool
) -> None:
    """Put the final model and, last of all, the record in place; then delete the checkpoints.

    With `keep_checkpoints`, the checkpoints keep the files that a model is loaded from.
    """
    if record["diverged"] is None:
        partial = out / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        model.config.use_cache = True  # the trainer turns it off
        model.save_pretrained(partial)
        task.save(partial)
        for file in sorted(partial.iterdir()):
            file.replace(out / file.name)
        partial.rmdir()
    write_json(out / RECORD, record)
    for checkpoint in out.glob("checkpoint-*"):
        if not keep_checkpoints or record["diverged"] is not None:
            shutil.rmtree(checkpoint)
            continue
        for file in checkpoint.iterdir():
            if file.suffix not in (".json", ".safetensors", ".py") and file.name != COMPLETE:
                file.unlink()
