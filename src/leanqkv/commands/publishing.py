"""A record of a command, written with its table and its page."""

from pathlib import Path
from typing import Any

from ..files import new_directory, write_json
from ..progress import console
from ..report.page import Kind, written


def publish(kind: Kind, out: Path, record: dict[str, Any]) -> None:
    """Print the record's table, and write the record and its page into `out`."""
    console.print(kind.terminal(record))
    with new_directory(out) as directory:
        write_json(directory / kind.file, record)
        page = kind.write(directory)
    console.print(written(page and out / page.name), soft_wrap=True)
