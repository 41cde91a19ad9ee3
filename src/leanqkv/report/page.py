"""A page: a heading, a lead and sections, which one template and one style sheet show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import RenderableType

from .. import __version__
from ..files import write_text
from ..records import reading
from .figures import Drawing

NO_PAGE = "no page: matplotlib is not installed: pip install 'leanqkv[report]'"


@dataclass(frozen=True)
class Note:
    """A paragraph in smaller type, or a `warning`."""

    note: str
    style: str = "note"


@dataclass(frozen=True)
class Figure:
    """A drawing and its caption; one with a title is numbered within its section."""

    drawing: Drawing
    caption: str
    title: str = ""


@dataclass(frozen=True)
class Code:
    """A block of code, its first part in bold."""

    code: str
    bold: str = ""


@dataclass(frozen=True)
class Section:
    """Parts under a heading, of level 2, within a section of level 3; or to be unfolded; not shown without parts.

    A part is a paragraph (a text), a list of texts, terms with their text or texts (a dictionary; texts in backticks
    are code), a table, any of the above, or a section; nothing is shown of empty ones.
    """

    heading: str
    parts: Sequence[Any]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        command: what wrote the record, above the heading.
        status: below the lead, marked; empty for none.
        made: in the footer, behind the version; None for records of several runs.
        title: of the window; by default the heading.
    """

    command: str
    heading: str
    lead: str
    sections: Sequence[Section]
    made: str | None = ""
    status: str = ""
    title: str = ""

    def html(self) -> str:
        """Return the page; the same content gives the same bytes."""
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("page.html.j2").render(page=self, version=__version__)


@dataclass(frozen=True)
class Kind:
    """A kind of record, and what is made of it.

    Attributes:
        file: the record's name.
        again: what to do about a damaged one.
        page, terminal: of a record.
        markdown: of a record, the text of the file `beside` the page; one that is there already may be `kept`.
        html: the page's name.
        load: of the directory and its record, which is all of it by default.
    """

    file: str
    again: str
    page: Callable[[Any], Page]
    terminal: Callable[[Any], RenderableType]
    markdown: Callable[[Any], str] | None = None
    beside: str = "table.md"
    kept: bool = False
    html: str = "report.html"
    load: Callable[[Path, dict[str, Any]], Any] = lambda directory, record: record

    def write(self, directory: Path) -> Path | None:
        """Write page and Markdown from the record alone; return the page's path, None without the extra `report`.

        Raises:
            LeanError: no such record there, or a damaged one.
        """
        place, beside = directory / self.html, directory / self.beside
        with reading(directory / self.file, self.again) as record:
            loaded = self.load(directory, record)
            drawn = self.page(loaded).html() if find_spec("matplotlib") else None
            if self.markdown and not (self.kept and beside.exists()):
                write_text(beside, self.markdown(loaded))
        if drawn is None:
            return None
        write_text(place, drawn)
        return place

    def show(self, directory: Path) -> RenderableType:
        """Return what a terminal shows of the record in `directory`."""
        with reading(directory / self.file, self.again) as record:
            return self.terminal(self.load(directory, record))


def written(page: Path | None) -> str:
    """Return the line that says where a page is, or why there is none."""
    return NO_PAGE if page is None else f"report: {page}"


def described(facts: Mapping[str, Any]) -> str:
    """Return names and values, such as those of a machine, in a line."""
    return ", ".join(f"{name} {in_words(value)}" for name, value in facts.items())


def in_words(value: Any) -> str:
    """Return one of them."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)


def footer(record: Mapping[str, Any]) -> str:
    """Return the commit of a record for a page's footer."""
    return f", commit {record['git_commit']}" if record.get("git_commit") else ""
