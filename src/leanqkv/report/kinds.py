"""The kinds of records that have a page, by the file that lies in a directory."""

from pathlib import Path

from . import analysis, bench, comparison_page, conversion, demo, frontier
from .page import Kind

KINDS = (bench.KIND, analysis.KIND, demo.KIND, conversion.KIND, frontier.KIND, comparison_page.KIND)


def kind_of(directory: Path) -> Kind:
    """Return the kind of the record in `directory`; a comparison where there is none."""
    return next((kind for kind in KINDS if (directory / kind.file).exists()), comparison_page.KIND)
