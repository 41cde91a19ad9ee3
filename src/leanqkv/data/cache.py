"""The cache of prepared data: directories that are complete or absent."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import LeanError
from ..files import disk_full_is_an_error, make_directory, remove, write_json
from ..job import FOREVER, Job, unfinished
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


def cached_directory(kind: str, content: str, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the description of cached data and its `directory`, which `fill` writes and describes on first use.

    Of several processes that ask for the same data the first one makes it, and the others wait.

    Args:
        kind: the folder of the cache.
        content: identifies the data.
        fill: is given the directory under a temporary name; with the manifest in it, an interrupted start has left it.
    """
    directory = cache_directory() / kind / hashlib.sha256(content.encode()).hexdigest()[:24]
    if not (directory / ABOUT).exists():
        advice = "make room, or set LEANQKV_CACHE to a folder on another disk"
        with (
            disk_full_is_an_error(make_directory(directory.parent), advice),
            unfinished(directory, "partial", "preparing the same data", FOREVER) as partial,
        ):
            try:
                if not (directory / ABOUT).exists():  # else another process has made it
                    job = Job(partial, {})
                    job.start(keep=[path.name for path in partial.iterdir() if (partial / MANIFEST).exists()])
                    write_json(partial / ABOUT, fill(partial))
                    job.publish(directory)
            finally:
                if not (partial / MANIFEST).exists():
                    remove(partial)
    about = read_record(directory / ABOUT, CACHED[kind], f"delete the folder {directory} and start again")
    return {**about, "directory": directory}


def file_state(file: Path) -> tuple[int, int, int]:
    """Return a file's size and times."""
    about = file.stat()
    # The second time is of the last change of any kind, and cannot be set back.
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns


def remembered(files: Sequence[Path], what: str, shape: Shape, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, a JSON value of all the bytes of `files`; of large files it is kept in the cache.

    Args:
        what: names the value.
        shape: of the value; one of another shape is computed again.
    """
    states = [file_state(file) for file in files]
    if sum(size for size, *_ in states) < REMEMBERED_BYTES:
        return compute()
    parts = (part for file, state in zip(files, states, strict=True) for part in (file.resolve(), *state))
    key = "\0".join(map(str, [what, *parts]))
    place = cache_directory() / "facts" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with suppress(LeanError):
        return read_record(place, {"value": shape}, "")["value"]
    value = compute()
    make_directory(place.parent)
    write_json(place, {"what": what, "value": value})
    return value
