"""The report page: every check's statement, outcome, figure and tables, from the records and figures beside it."""

import base64
from collections.abc import Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from leanqkv.files import write_text
from leanqkv.report.html import render

from .check import Check, passed
from .report import Record


def write_page(file: Path, checks: Sequence[tuple[Check, Record, Path]]) -> None:
    """Write the page.

    checks: each with its record and the directory that holds its figure.png, if it has one.
    """
    template = Path(__file__).with_name("theory.html.j2")
    write_text(file, render(template, checks=[_shown(*one) for one in checks]))


def _shown(check: Check, record: Record, directory: Path) -> dict[str, object]:
    findings = check.findings(record)
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    picture = directory / "figure.png"
    made = [f"{name} {version}" for name, version in record["versions"].items()]
    return {
        "name": check.name,
        "statement": check.statement,
        "source": check.source,
        "findings": findings,
        "passed": passed(findings),
        "figure": base64.b64encode(picture.read_bytes()).decode() if check.draw is not None else None,
        "tables": [Markup(markdown.render(table)) for table in check.tables(record).split("\n\n")],
        "made": f"Made with {', '.join(made)}.",
    }
