"""The cache of prepared data: directories that are complete or absent."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import (
    disk_full_is_an_error,
    make_directory,
    partial_name,
    read_json,
    remove,
    remove_leftovers,
    write_json,
)

# What describes a directory's content.
ABOUT = "data.json"


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
        fill: is given a temporary directory, which is renamed when it is complete.
    """
    directory = cache_directory() / kind / hashlib.sha256(content.encode()).hexdigest()[:24]
    if not (directory / ABOUT).exists():
        make_directory(directory.parent)
        remove_leftovers(directory.parent, directory.name)
        partial = partial_name(directory)
        try:
            with disk_full_is_an_error(directory.parent, "make room, or set LEANQKV_CACHE to a folder on another disk"):
                partial.mkdir()
                write_json(partial / ABOUT, fill(partial))
            try:
                partial.rename(directory)
            except OSError:
                if not (directory / ABOUT).exists():  # else another process finished the same data first
                    raise
        finally:
            remove(partial)
    return {**read_json(directory / ABOUT), "directory": directory}
