"""Atomic file writes, directories that can be written, JSON files, and hashes of files."""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

import psutil

from .errors import LeanError

# Of the run records; a reader refuses any other.
RECORD_FORMAT = 1
# Levels of a JSON file: more than that is nobody's, and copying it would exceed Python's own limit.
DEEPEST = 100
# Processes of several machines may write to one directory, and know only their own machine's process numbers.
NODE = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:63] or "node"
# Like `Path.is_dir`, but False for invalid names.
is_directory = os.path.isdir


def partial_name(file: Path) -> Path:
    """Return the temporary name under which this process writes `file`; no two processes share one."""
    return file.with_name(f".{file.name}.{NODE}-{os.getpid()}.partial")


def remove_leftovers(file: Path) -> None:
    """Remove what killed processes of this machine left of `file` under temporary names."""
    for path in file.parent.glob(f".{escape(file.name)}.{escape(NODE)}-*.partial"):
        process = path.name.removesuffix(".partial").rpartition("-")[2]
        if process.isdecimal() and not _is_writing(int(process), path):
            remove(path)


def _is_writing(process: int, path: Path) -> bool:
    """Whether the process that made `path` still runs, and its number has not been given to a younger one."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        return psutil.Process(process).create_time() <= path.stat().st_mtime + 1  # both are rounded
    return False


def remove(path: Path) -> None:
    """Remove a file or a directory with its content. Missing paths are ignored."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary name to write to, which becomes `file` at the end: no reader ever sees half a file.

    The file gets the mode that the umask gives to new files; libraries write weights for the owner alone.
    """
    remove_leftovers(file)
    partial = partial_name(file)
    try:
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(mode)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def flush(*paths: Path) -> None:
    """Wait until files and the entries of directories are on the disk, where the system can say so."""
    for path in paths:
        with suppress(OSError):  # some systems flush no directory
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out`, which is absent or empty, at the end: all of it or nothing."""
    partial = make_directory(partial_name(out))
    try:
        yield partial
        check_free(out)  # another process may have filled it
        if out.exists():
            out.rmdir()
        partial.replace(out)
    finally:
        remove(partial)


def write_text(file: Path, content: str) -> None:
    """Write `content` as UTF-8, atomically. Names in Markdown cannot bring HTML with them: only `<br>` stays a tag."""
    if file.suffix == ".md":
        content = re.sub(r"(?ms)(^```.*?^```$)|<(?!br>)", lambda found: found[1] or "&lt;", content)
    with replacing(file) as partial:
        partial.write_text(content, encoding="utf-8")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, atomically."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def check_place(out: Path, *sources: Path | None) -> None:
    """Check that a directory can be at `out`, and that it is in none of the `sources`, which must stay as they are.

    Raises:
        LeanError: no name, a name too long, links that lead nowhere, a file there or above it, or inside a source.
    """
    shown = str(out) if len(str(out)) <= 80 else f"{str(out)[:77]}..."
    if out.name in ("", ".."):
        raise LeanError(f"`out` is the name of a directory, found {shown!r}; give it a name")
    # The second is the longest name that will be written beside it.
    for path in (out, partial_name(out)):
        try:
            path.stat()
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            above = next(parent for parent in out.parents if parent.exists() and not parent.is_dir())
            raise LeanError(f"{shown} cannot be made: {above} is a file; choose another `out`") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LeanError(f"{shown} cannot be made: {reason}; choose another `out`") from None
    if os.path.lexists(out) and not out.is_dir():
        what = "is a file" if out.exists() else "is a link to nothing"
        raise LeanError(f"{shown} {what}, and nothing is ever written over; choose another `out`")
    above_out = [parent for parent in Path(os.path.realpath(out)).parents if parent.exists()]
    for source in sources:
        if source is not None and is_directory(source) and any(parent.samefile(source) for parent in above_out):
            raise LeanError(f"{shown} lies in {source}, which would change; choose an `out` outside of it")


def check_new_file(out: Path) -> None:
    """Raise a LeanError unless a file can be made at `out`, in a folder that exists: nothing is ever written over."""
    if not out.name or not is_directory(out.parent):
        raise LeanError(f"`out` {out} cannot be written; give a file, in a folder that exists")
    if os.path.lexists(out):
        raise LeanError(f"{out} exists, and nothing is ever written over; choose another `out`")


def check_apart(out: Path, *texts: str | None) -> None:
    """Raise a LeanError if `out` lies in a folder of texts, alone or in a mixture: its files would become texts."""
    for text in filter(None, texts):
        names = [text, *(name for part in text.split(",") for name in (part.strip(), part.strip().rpartition(":")[0]))]
        check_place(out, *(Path(name) for name in names if name))


def check_free(out: Path, *sources: Path) -> None:
    """Raise a LeanError if `out` is no new or empty directory, or in a source: nothing is ever written over."""
    check_place(out, *sources)
    if out.is_dir() and any(out.iterdir()):
        raise LeanError(f"{out} exists and is not empty; nothing is ever written over, choose another `out`")


def looks_like_path(name: str) -> bool:
    """Tell a path that does not exist from a name on the Hugging Face hub."""
    return bool(Path(name).suffix) or name.startswith((".", "/", "~"))


def make_directory(directory: Path) -> Path:
    """Make `directory` and those above it, and return it.

    Raises:
        LeanError: that is not possible.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeanError(f"{directory} cannot be made: {error.strerror}; choose another place") from None
    return directory


@contextmanager
def disk_full_is_an_error(place: Path, advice: str) -> Iterator[None]:
    """Turn every library's own error about a full disk into one line."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if full or shutil.disk_usage(place).free < 2**20:  # torch.save only says that a position was not the expected
            raise LeanError(f"the disk is full: {place} could not be written; {advice}") from error
        raise


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        LeanError: missing, unreadable, nested too deep, or not a JSON object; names the file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LeanError(f"there is no {file}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LeanError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise LeanError(f"{file} does not hold a JSON object")
    level, depth = [content], 0
    while level := [part for whole in level for part in _parts(whole)]:
        if (depth := depth + 1) > DEEPEST:
            raise LeanError(f"{file} is nested more than {DEEPEST} levels deep")
    return content


def _parts(whole: Any) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ()


def read_yaml(file: Path) -> Any:
    """Return the content of a data file of this package."""
    import yaml

    # libyaml reads ten times as fast; not every build of PyYAML has it.
    return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def hash_files(*files: Path) -> str:
    """Return the SHA-256 of the files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
