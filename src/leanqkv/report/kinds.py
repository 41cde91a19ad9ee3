"""The kinds of records that have a page, by the file that lies in a directory."""

from pathlib import Path

from ..errors import LeanError
from . import bench, comparison_page, conversion, frontier
from .page import Kind

# Drawn by a checkout's experiments, by the file of their records.
ELSEWHERE = {"analysis.json": "python -m experiments.analysis --out", "demo.json": "python -m experiments.demo --out"}
KINDS = (bench.KIND, conversion.KIND, frontier.KIND, comparison_page.KIND)


def kind_of(directory: Path) -> Kind:
    """Return the kind of the record in `directory`; a comparison where there is none.

    Raises:
        LeanError: one of ELSEWHERE.
    """
    for file, command in ELSEWHERE.items():
        if (directory / file).exists():
            raise LeanError(f"{directory} holds {file}; in a checkout of leanqkv, {command} {directory} draws it again")
    return next((kind for kind in KINDS if (directory / kind.file).exists()), comparison_page.KIND)
