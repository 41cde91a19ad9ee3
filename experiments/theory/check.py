"""What every check has in common: what it states, its record, and what has to hold for it to pass.

A check is a file `<name>.py` of pure functions and a file `<name>_check.py` with its settings, what is measured, and
the tables and the figure that are made from the record.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from leanqkv.errors import LeanError
from leanqkv.files import read_json, write_json, write_text

from .report import Record, save_figure

RECORD = 1
CHECKS = ("initial-spread", "layer-norm", "basis-transfer", "skip-absorption", "hadamard", "in-context")

# Called with the part at hand, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Finding:
    """One line of an outcome: what has to hold, what was found, whether that bears it out."""

    what: str
    found: str
    passed: bool


@dataclass(frozen=True)
class Check:
    """A statement of a paper and how it is checked.

    Attributes:
        statement, source: in a sentence or two, with paper and number.
        settings: a frozen dataclass; its defaults are the full check, its `quick()` one of seconds.
        run: settings and progress -> the record, made of JSON's types.
        findings: record -> what has to hold for the check to pass.
        tables: record -> Markdown tables, a blank line between two.
        draw: record and an empty matplotlib figure; None where there is nothing to look at.
    """

    name: str
    statement: str
    source: str
    settings: Any
    run: Callable[[Any, Progress], dict[str, Any]]
    findings: Callable[[Record], list[Finding]]
    tables: Callable[[Record], str]
    draw: Callable[[Record, Any], None] | None

    @property
    def kind(self) -> str:
        return f"theory/{self.name}"

    def load(self, file: Path) -> dict[str, Any]:
        """Raises:
        LeanError: not there, unreadable, or not a record of this check.
        """
        record = read_json(file)
        if record.get("kind") != self.kind or record.get("record") != RECORD:
            raise LeanError(f"{file} is no {self.kind} record of version {RECORD}: name another --out")
        return record

    def write(self, record: Record, out: Path) -> None:
        """table.md and, where there is one, figure.png."""
        write_text(out / "table.md", self.tables(record))
        if self.draw is not None:
            save_figure(self.draw, record, out / "figure.png")

    def compute(self, settings: Any, out: Path, progress: Progress) -> dict[str, Any]:
        """Runs the check and writes record.json.

        Raises:
            LeanError: `out` is a file, or holds another check's record, which is not written over.
        """
        if out.exists() and not out.is_dir():
            raise LeanError(f"--out takes a directory, and {out} is a file")
        file = out / "record.json"
        if file.exists():
            self.load(file)
        out.mkdir(parents=True, exist_ok=True)
        record = self.run(settings, progress)
        write_json(file, record)
        return record


def load_check(name: str) -> Check:
    """The check of one of CHECKS' names."""
    return import_module(f".{name.replace('-', '_')}_check", __package__).CHECK


def measured(check: Check, settings: Any, parts: Mapping[str, Callable[[], Any]], progress: Progress) -> dict[str, Any]:
    """The record: statement, settings, versions, what each part measured and in how many seconds, and the outcome."""
    record: dict[str, Any] = {
        "record": RECORD,
        "kind": check.kind,
        "statement": check.statement,
        "source": check.source,
        "settings": rounded(asdict(settings)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("leanqkv", "torch", "numpy")},
        },
        "seconds": {},
        "measured": {},
    }
    for done, (name, part) in enumerate(parts.items()):
        progress(name.replace("_", " "), done, len(parts))
        begin = time.perf_counter()
        record["measured"][name] = rounded(part())
        record["seconds"][name] = round(time.perf_counter() - begin, 1)
    findings = check.findings(record)
    record["outcome"] = {"passed": passed(findings), "findings": [asdict(finding) for finding in findings]}
    return record


def passed(findings: Sequence[Finding]) -> bool:
    return all(finding.passed for finding in findings)


def rounded(value: Any) -> Any:
    """JSON's types, numbers to six digits: a record is read by people too."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
