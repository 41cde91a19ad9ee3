"""Where prepared data is kept, whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What there is to say about a directory's content; written last.
ABOUT = "data.json"


def cache_directory() -> Path:
    """$LEANQKV_CACHE, else leanqkv under $XDG_CACHE_HOME or ~/.cache."""
    if "LEANQKV_CACHE" in os.environ:
        return Path(os.environ["LEANQKV_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanqkv"


def made_once(directory: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `fill` says about the files that it writes into a directory, which then becomes `directory`; or what an
    earlier call was told."""
    if not (directory / ABOUT).exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            (partial / ABOUT).write_text(json.dumps(fill(partial), indent=1))
            try:
                partial.rename(directory)
            except OSError:
                if not (directory / ABOUT).exists():  # else another process finished the same data first
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return json.loads((directory / ABOUT).read_text())
