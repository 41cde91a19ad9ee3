"""The directory of a run: whose it is, its checkpoints, and what is put there at the end."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from ..errors import LeanError
from ..files import read_json, write_json
from .spec import RunSpec
from .tasks import TrainingTask

RECORD = "record.json"
SPEC = "run.json"
# Written into a checkpoint last; a checkpoint without it was cut off and is never picked up.
COMPLETE = "complete"


@contextmanager
def only_here(out: Path) -> Iterator[None]:
    """Holds `out` against a second process on the same run; several processes of one run are one."""
    if int(os.environ.get("RANK", "0")):
        yield
        return
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise LeanError(f"another process is training in {out}; wait for it, or stop it first") from None


@contextmanager
def disk_full_is_an_error(out: Path) -> Iterator[None]:
    """Every library reports a full disk in its own way; this makes it one line."""
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
    """Raises:
    LeanError: `out` holds something that is not a run.
    """
    if (
        out.exists()
        and not (out / SPEC).exists()
        and (not out.is_dir() or any(not file.name.startswith(".") for file in out.iterdir()))
    ):
        raise LeanError(f"{out} is not empty and not a run of ours; choose another --out")


def claim(out: Path, spec: RunSpec) -> dict[str, Any] | None:
    """Makes `out` this run's own; returns the record if the run is already done."""
    spec_file = out / SPEC
    if spec_file.exists():
        found = read_json(spec_file)
        wanted = spec.as_json()
        different = [key for key in wanted if key != "precision_timings" and found.get(key) != wanted[key]]
        if different:
            shown = "; ".join(
                f"{key}: {_short(found.get(key))} there, {_short(wanted[key])} asked" for key in different
            )
            raise LeanError(f"{out} holds another run ({shown}); choose another --out or delete it")
        if (out / RECORD).exists():
            return read_json(out / RECORD)
        return None
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(spec_file, spec.as_json())
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def last_checkpoint(out: Path) -> str | None:
    """The newest complete checkpoint; what was cut off while being written is removed."""
    complete = []
    for checkpoint in out.glob("checkpoint-*"):
        if (checkpoint / COMPLETE).exists():
            complete.append(checkpoint)
        else:
            shutil.rmtree(checkpoint, ignore_errors=True)  # another process may be at it too
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def finish(
    out: Path, model: PreTrainedModel, task: TrainingTask, record: dict[str, Any], keep_checkpoints: bool
) -> None:
    """Puts the final model and, last of all, the record in place; then drops the checkpoints, or what is not the model
    from each of them."""
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
        if keep_checkpoints and record["diverged"] is None:
            _thin(checkpoint)
        else:
            shutil.rmtree(checkpoint)


def _thin(checkpoint: Path) -> None:
    """Leaves of a checkpoint what a model is read from, without what training would go on from."""
    for file in checkpoint.iterdir():
        if file.suffix not in (".json", ".safetensors", ".py") and file.name != COMPLETE:
            file.unlink()
