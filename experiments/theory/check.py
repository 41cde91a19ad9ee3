"""What every check has in common: its statement, its record, and what must hold for it to pass.

A check is a folder: `statement.py` has what the paper states as pure functions; `check.py` has the settings, what is
measured, and the findings, tables and figure that are made from the record; the larger checks have `measure.py` and
`tables.py` beside it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from leanqkv.environment import default_device, record_header
from leanqkv.errors import LeanError
from leanqkv.files import RECORD_FORMAT, read_json, write_json, write_text

from .report import Record, save_figure

CHECKS = ("initial-spread", "layer-norm", "basis-transfer", "skip-absorption", "hadamard", "in-context")

Progress = Callable[[str, int, int], None]  # the part at hand, how much of it is done, how much there is
Parts = Mapping[str, Callable[[], Any]]  # what is measured, made of JSON's types, by name


@dataclass(frozen=True)
class Finding:
    """One line of an outcome: what must hold, what was found, and whether it holds."""

    what: str
    found: str
    passed: bool


@dataclass(frozen=True)
class Check:
    """A statement of a paper and how it is checked.

    Attributes:
        statement, source: in a sentence or two, with paper and number.
        settings: a frozen dataclass; its defaults are the full check, its `quick()` one of seconds.
        parts: settings and progress -> what is measured.
        findings: record -> what must hold for the check to pass.
        tables: record -> Markdown tables, a blank line between two.
        draw: draws a record into an empty matplotlib figure; None where there is nothing to see.
        digits: to which numbers are rounded in the record, which is read by people too.
    """

    name: str
    statement: str
    source: str
    settings: Any
    parts: Callable[[Any, Progress], Parts]
    findings: Callable[[Record], list[Finding]]
    tables: Callable[[Record], str]
    draw: Callable[[Record, Any], None] | None
    digits: int = 6

    @property
    def kind(self) -> str:
        return f"theory/{self.name}"

    def load(self, file: Path) -> dict[str, Any]:
        """Read a record of this check.

        Raises:
            LeanError: not there, unreadable, or not a record of this check.
        """
        record = read_json(file)
        # Records older than the common header have kind and name in one.
        kind = "/".join(record[key] for key in ("kind", "name") if key in record)
        if kind != self.kind or record.get("record") != RECORD_FORMAT:
            raise LeanError(f"{file} is no {self.kind} record of version {RECORD_FORMAT}: name another --out")
        return record

    def run(self, settings: Any, progress: Progress) -> dict[str, Any]:
        """Measure every part and return the record: header, statement, settings, measurements, seconds, outcome."""
        record = record_header("theory", self.name, default_device())
        record |= {"statement": self.statement, "source": self.source, "settings": self._rounded(asdict(settings))}
        record |= {"seconds": {}, "measured": {}}
        parts = self.parts(settings, progress)
        for done, (name, part) in enumerate(parts.items()):
            progress(name.replace("_", " "), done, len(parts))
            begin = time.perf_counter()
            record["measured"][name] = self._rounded(part())
            record["seconds"][name] = round(time.perf_counter() - begin, 1)
        findings = self.findings(record)
        record["outcome"] = {"passed": passed(findings), "findings": [asdict(finding) for finding in findings]}
        return record

    def compute(self, settings: Any, out: Path, progress: Progress) -> dict[str, Any]:
        """Run the check and write record.json.

        Raises:
            LeanError: `out` is a file, or holds another check's record, which is not overwritten.
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

    def write(self, record: Record, out: Path) -> None:
        """Write table.md and, where there is one, figure.png."""
        write_text(out / "table.md", self.tables(record))
        if self.draw is not None:
            save_figure(self.draw, record, out / "figure.png")

    def _rounded(self, value: Any) -> Any:
        """JSON's types; of a path the last part, since the rest says nothing but where it was."""
        if isinstance(value, dict):
            return {key: self._rounded(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._rounded(one) for one in value]
        if isinstance(value, Path):
            return value.name
        return float(f"{value:.{self.digits}g}") if isinstance(value, float) else value


def load_check(name: str) -> Check:
    """Return the check of one of CHECKS' names."""
    return import_module(f".{name.replace('-', '_')}.check", __package__).CHECK


def passed(findings: Sequence[Finding]) -> bool:
    return all(finding.passed for finding in findings)
