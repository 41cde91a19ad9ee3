"""The cache of prepared data: directories that are complete or absent."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import LeanError, UnreachableError
from ..files import (
    disk_full_is_an_error,
    leftovers,
    make_directory,
    partial_name,
    remove,
    remove_leftovers,
    write_json,
)
from ..records import CACHED, Shape, read_record

# What describes a directory's content, and what says how far one that is not complete has come.
ABOUT = "data.json"
MANIFEST = "manifest.json"
# Of files this large what was computed from all their bytes is kept, until their size or time changes.
REMEMBERED_BYTES = 2**26


def cache_directory() -> Path:
    """Return $LEANQKV_CACHE, else leanqkv under $XDG_CACHE_HOME or ~/.cache."""
    if "LEANQKV_CACHE" in os.environ:
        return Path(os.environ["LEANQKV_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanqkv"


def made_once(kind: str, content: str, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the description of cached data and its `directory`, which `fill` writes and describes on first use.

    Args:
        kind: the folder of the cache.
        content: identifies the data.
        fill: is given a temporary directory, which is renamed when it is complete; with the manifest in it, it is what
            an earlier start that was stopped has left.
    """
    directory = cache_directory() / kind / hashlib.sha256(content.encode()).hexdigest()[:24]
    if not (directory / ABOUT).exists():
        make_directory(directory.parent)
        partial = partial_name(directory)
        _take_over(directory, partial)
        remove_leftovers(directory.parent, directory.name)
        try:
            with disk_full_is_an_error(directory.parent, "make room, or set LEANQKV_CACHE to a folder on another disk"):
                partial.mkdir(exist_ok=True)
                try:
                    about = fill(partial)
                except UnreachableError:  # what was read of it stays
                    raise
                except LeanError:  # when the data is mended, it has another name
                    remove(partial)
                    raise
                write_json(partial / ABOUT, about)
            try:
                partial.rename(directory)
            except OSError:
                if not (directory / ABOUT).exists():
                    raise
                remove(partial)  # another process finished the same data first
        finally:
            if not (partial / MANIFEST).exists():
                remove(partial)
    about = read_record(directory / ABOUT, CACHED[kind], f"delete the folder {directory} and start again")
    return {**about, "directory": directory}


def _take_over(directory: Path, partial: Path) -> None:
    """Give the work of a process that was stopped, if there is one, the name `partial`."""
    for left in leftovers(directory.parent, directory.name):
        if not partial.exists() and (left / MANIFEST).exists():
            with suppress(OSError):  # another process was faster
                os.utime(left)  # older than this process, it would be taken for what a dead one has left
                left.rename(partial)


def remembered(files: Sequence[Path], what: str, shape: Shape, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, a JSON value of all the bytes of `files`; of large files it is kept in the cache.

    Args:
        what: names the value.
        shape: of the value; one of another shape is computed again.
    """
    facts = [file.stat() for file in files]
    if sum(fact.st_size for fact in facts) < REMEMBERED_BYTES:
        return compute()
    # The second time is of the last change of any kind, and cannot be set back.
    states = [(file.resolve(), f.st_size, f.st_mtime_ns, f.st_ctime_ns) for file, f in zip(files, facts, strict=True)]
    key = "\0".join([what, *(f"{part}" for state in states for part in state)])
    place = cache_directory() / "facts" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with suppress(LeanError):
        return read_record(place, {"value": shape}, "")["value"]
    value = compute()
    make_directory(place.parent)
    write_json(place, {"what": what, "value": value})
    return value
