"""Atomic file writes, JSON files, and hashes of files."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import yaml

from .errors import LeanError

# Of the run records; a reader refuses any other.
RECORD_FORMAT = 1


def partial_name(file: Path) -> Path:
    """Return the temporary name under which this process writes `file`; no two processes share one."""
    return file.with_name(f".{file.name}.{os.getpid()}.partial")


def write_text(file: Path, content: str) -> None:
    """Write under a temporary name and rename, so that no reader ever sees half a file."""
    partial = partial_name(file)
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, atomically."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        LeanError: missing, unreadable, or not a JSON object; names the file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LeanError(f"there is no {file}") from None
    except (OSError, ValueError) as error:
        raise LeanError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise LeanError(f"{file} does not hold a JSON object")
    return content


def read_yaml(file: Path) -> Any:
    """Return the content of a data file of this package."""
    # libyaml reads ten times as fast; not every build of PyYAML has it.
    return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def add_file(digest: Any, file: Path) -> None:
    """Feed the bytes of `file` to a hash object of hashlib."""
    with file.open("rb") as stream:
        hashlib.file_digest(stream, lambda: digest)


def hash_files(*files: Path) -> str:
    """Return the SHA-256 of the files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for file in files:
        add_file(digest, file)
    return digest.hexdigest()
