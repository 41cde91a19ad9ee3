"""The cache of prepared data: directories that are complete or absent."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent, ignore_cleanup_errors=True) as name:
            partial = Path(name, "data")
            partial.mkdir()
            (partial / ABOUT).write_text(json.dumps(fill(partial), indent=1))
            try:
                partial.rename(directory)
            except OSError:
                if not (directory / ABOUT).exists():  # else another process finished the same data first
                    raise
    return {**json.loads((directory / ABOUT).read_text()), "directory": directory}
