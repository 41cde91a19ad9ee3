"""The report page: every check's statement, outcome, figure and tables, from the records and figures beside it."""

import base64
from collections.abc import Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from leanqkv.files import write_text
from leanqkv.report.page import Note, Page, Section

from .check import Check, passed
from .report import Record

TABLE = Markup('<div class="scroll" role="region" aria-label="{}, table {}" tabindex="0">\n{}</div>')
FIGURE = Markup('<figure><img alt="{}: the measurements of the tables below" src="data:image/png;base64,{}"></figure>')


def write_page(file: Path, checks: Sequence[tuple[Check, Record, Path]]) -> None:
    """Write the page.

    checks: each with its record and the directory that holds its figure.png, if it has one.
    """
    count = sum(passed(check.findings(record)) for check, record, _ in checks)
    page = Page(
        "experiments.theory",
        "What the papers prove, checked",
        f"{count} of {len(checks)} checks pass. Each line says what must hold and what was found. Where a paper's "
        "statement does not hold, the line checks that it fails.",
        [_section(*one) for one in checks],
        title=f"Theory: {', '.join(check.name for check, _, _ in checks)}",
    )
    write_text(file, page.html())


def _section(check: Check, record: Record, directory: Path) -> Section:
    outcomes = {True: Markup("<strong>pass</strong>"), False: Markup("<strong>FAIL</strong>")}
    findings = [
        Markup("{}: {}: {}").format(outcomes[one.passed], one.what, one.found) for one in check.findings(record)
    ]
    figure = None
    if check.draw is not None:
        figure = FIGURE.format(check.name, base64.b64encode((directory / "figure.png").read_bytes()).decode())
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tables = [Markup(markdown.render(table)) for table in check.tables(record).split("\n\n")]
    made = [f"{name} {version}" for name, version in record["versions"].items()]
    return Section(
        check.name.replace("-", " ").capitalize(),
        [
            Markup('<p>{} <span class="note">({})</span></p>').format(check.statement, check.source),
            findings,
            figure,
            *(TABLE.format(check.name, number, table) for number, table in enumerate(tables, 1)),
            Note(f"Made with {', '.join(made)}."),
        ],
    )
