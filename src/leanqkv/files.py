"""Files that are whole or absent."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from .errors import LeanError

# Of the run records; a reader refuses any other.
RECORD_FORMAT = 1


def partial_name(file: Path) -> Path:
    """Where a process writes what is to become `file`; processes side by side do not meet there."""
    return file.with_name(f".{file.name}.{os.getpid()}.partial")


def write_text(file: Path, content: str) -> None:
    """Writes under a temporary name and renames, so that no reader ever sees half a file."""
    partial = partial_name(file)
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_text(file, json.dumps(content, indent=1) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Raises:
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
