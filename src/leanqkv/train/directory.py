"""The directory of a run: its owner, its checkpoints, and the files put there at the end."""

import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints.card import CARD
from ..environment import hardware
from ..errors import LeanError
from ..files import flush, hash_files, read_json, remove, write_json, write_text
from ..job import LOCK, Job, locked
from ..records import BEGUN, FINISHED, read_record
from ..records import RECORD as RUN_RECORD
from .model_card import model_card
from .spec import RunSpec
from .tasks import TrainingTask

RECORD = "record.json"
SPEC = "run.json"
AGAIN = "delete the run's directory to train again"
# Written into a checkpoint last, with the hash of each of its files; one without it was cut off and is never picked up.
COMPLETE = "complete"
# How files of a checkpoint end that a model is loaded from.
KEPT = (".json", ".safetensors", ".py")


def claim(out: Path, spec: RunSpec) -> dict[str, Any] | None:
    """Write the specification to `out`, or compare it with the one there; return the record of a finished run.

    Raises:
        LeanError: `out` holds another run, or something that is not a run.
    """
    job = Job(out, spec.as_json(), SPEC)
    if not job.claim("run", ignored=("precision_timings",)):
        job.write()
    if not (out / RECORD).exists():
        return None
    record = read_record(out / RECORD, FINISHED, AGAIN)
    if record["diverged"] is None and not (record["final"] and record["evaluations"]):
        raise LeanError(f"{out / RECORD} has no result; {AGAIN}")
    return record


def note_hardware(out: Path, device: str) -> None:
    """Write into the specification's file where the run is trained now."""
    write_json(out / SPEC, {**read_json(out / SPEC), "hardware": hardware(device)})


def begun_run(out: Path) -> dict[str, Any] | None:
    """Return the record of a finished run in `out`, else the specification of one that was begun, else None."""
    shapes = {out / RECORD: RUN_RECORD, out / SPEC: BEGUN}
    return next((read_record(file, shape, AGAIN) for file, shape in shapes.items() if file.exists()), None)


def checkpoints(out: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, in order, those that were cut off included.

    A link, or a folder of another name such as checkpoint-40-backup, is its owner's and is left alone.
    """
    folders = (path for path in out.glob("checkpoint-*") if path.is_dir() and not path.is_symlink())
    steps = {int(name[1]): path for path in folders if (name := re.fullmatch("checkpoint-([1-9][0-9]*)", path.name))}
    return dict(sorted(steps.items()))


def complete_checkpoints(out: Path) -> dict[int, Path]:
    """Return the checkpoints of a run that were not cut off, by step, in order."""
    return {step: path for step, path in checkpoints(out).items() if (path / COMPLETE).exists()}


def complete(checkpoint: Path, keep_earlier: bool) -> None:
    """Mark a checkpoint as complete, with the hashes of its files; then remove all but the last two, unless kept."""
    files = [file for file in sorted(checkpoint.rglob("*")) if file.is_file() and file.name != COMPLETE]
    hashes = _hashes(checkpoint, (str(file.relative_to(checkpoint)) for file in files))
    flush(*files)  # before the mark: a machine that stops may keep a later file and lose an earlier one
    write_json(checkpoint / COMPLETE, {"sha256": hashes})
    flush(checkpoint / COMPLETE, checkpoint)
    for earlier in () if keep_earlier else list(checkpoints(checkpoint.parent).values())[:-2]:
        remove(earlier)


def _hashes(directory: Path, names: Iterable[str]) -> Mapping[str, str | None]:
    """Return the hashes of files by name, None of one that is missing."""

    def of(name: str) -> str | None:
        return hash_files(directory / name) if (directory / name).is_file() else None

    names = list(names)
    with ThreadPoolExecutor() as pool:  # hashing runs beside other threads, and the files are large
        return dict(zip(names, pool.map(of, names), strict=True))


def last_checkpoint(out: Path) -> str | None:
    """Return the newest complete checkpoint whose files are as they were saved.

    Those that were cut off are removed, and so are, with a warning, damaged ones behind it: the run makes them again.

    Raises:
        LeanError: all are damaged.
    """
    for path in checkpoints(out).values():
        if not (path / COMPLETE).exists():
            remove(path)
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints(out).values()):
        if fault := _damage(path):
            damaged[path] = fault
            continue
        for later, fault in damaged.items():
            warnings.warn(
                f"{later} is damaged and is removed ({fault}); the run goes on from {path.name}", RuntimeWarning, 2
            )
            remove(later)
        return str(path)
    for path, fault in damaged.items():
        raise LeanError(
            f"{path} cannot be gone on from: {fault}; there is no earlier checkpoint to take. Put it right, or delete "
            "the run's checkpoints to train from the start"
        )
    return None


def _damage(checkpoint: Path) -> str | None:
    """Return how a complete checkpoint differs from the one that was saved; None if it does not."""
    try:
        saved = read_record(checkpoint / COMPLETE, {"sha256": {str: str}}, "delete the checkpoint")["sha256"]
    except LeanError as error:
        return str(error)
    for name, digest in _hashes(checkpoint, saved).items():
        if digest != saved[name]:
            return f"{name} is missing" if digest is None else f"{name} is not as it was saved"
    return None if saved else f"{COMPLETE} lists no files"


def finish(
    out: Path,
    model: PreTrainedModel,
    task: TrainingTask,
    record: dict[str, Any],
    keep_checkpoints: bool,
    initial: Path | None = None,
) -> None:
    """Put the final model and, last of all, the record in place; then remove whatever a finished run has no use for.

    Args:
        keep_checkpoints: the checkpoints keep the files that a model is loaded from.
        initial: the checkpoint that the run started from.
    """
    if record["diverged"] is None:
        partial = out / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        model.config.use_cache = True  # the trainer turns it off
        model.save_pretrained(partial)
        task.save(partial)
        if not (out / CARD).exists():  # else its owner has written one
            tokenizer = (partial / "tokenizer.json").exists()
            write_text(partial / CARD, model_card(out.resolve().name, record, initial, tokenizer))
        for file in sorted(partial.iterdir()):
            if file.is_file():
                shutil.copymode(out / SPEC, file)  # weights are written for their owner alone
            file.replace(out / file.name)
        partial.rmdir()
    record["checkpoints_kept"] = keep_checkpoints and record["diverged"] is None
    write_json(out / RECORD, record)
    for path in _remains(out, record):
        remove(path)


def clean(out: Path, record: dict[str, Any]) -> None:
    """Remove what a process that was killed after it wrote the record has left in a finished run."""
    if _remains(out, record):
        with locked(out, "training"):
            for path in _remains(out, record):
                remove(path)


def _remains(out: Path, record: dict[str, Any]) -> list[Path]:
    """Return what a finished run has no use for: checkpoints, or their state of training if they are kept; its lock."""
    remains = [path for path in (out / ".partial", out / LOCK) if path.exists()]
    kept = record["checkpoints_kept"]
    evaluated = {entry["step"] for entry in record["evaluations"]} if kept else {}  # at others the time was up
    for step, checkpoint in checkpoints(out).items():
        if step in evaluated:
            remains += [file for file in checkpoint.iterdir() if file.suffix not in KEPT and file.name != COMPLETE]
        else:
            remains.append(checkpoint)
    return remains
