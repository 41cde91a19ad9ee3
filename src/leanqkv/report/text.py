"""How numbers, lists and tables are written."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from rich import box
from rich.table import Table as TerminalTable
from rich.text import Text

from ..compare.statistics import PairedDifference, standard_deviation

ABSENT = "–"


@dataclass(frozen=True)
class Table:
    """A table of text, with a note below it. The first column holds names; a cell's further lines are remarks on it.

    remarks: on a page, by name, what stands below a row's second cell: its class and its words.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    remarks: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table for GitHub, without title and note; cells are Markdown, but for line breaks and bars."""
        headers = [header.replace("\n", " ") for header in self.headers]
        rows = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in self.rows]
        return markdown_table(headers, rows)

    def terminal(self, whole: Collection[str] = (), bold: Sequence[str] = ()) -> TerminalTable:
        """Return the table for a terminal, without its Markdown.

        whole: headers of columns that never wrap; bold: the style of each row's bold cells, in place of bold type.
        """
        table = TerminalTable(
            title=Text(self.title) if self.title else None,
            caption=Text(f"\n{self.note}") if self.note else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        for header in self.headers:
            table.add_column(header.replace("`", ""), justify="right", no_wrap=header in whole, overflow="fold")
        table.columns[0].justify = "left"
        for row, style in zip(self.rows, bold or repeat("bold"), strict=False):
            table.add_row(*(Text(re.sub(r"\*\*|`", "", cell), style if "**" in cell else "") for cell in row))
        return table


def signed(value: float, digits: int = 4) -> str:
    """Return the number with its sign, a true minus: −0.0211."""
    return f"{value:+,.{digits}f}".replace("-", "−")


def plus_minus(text: str, width: float | None, form: str = ".4f") -> str:
    """Return a number that is written already, and how far it may be off where that is known: −0.0211 ± 0.0013."""
    return text if width is None else f"{text} ± {width:{form}}"


def mean_with_deviation(values: Sequence[float]) -> str:
    """Return the mean and the sample's standard deviation: 3.9050 (0.0071); ± is kept for intervals."""
    deviation = standard_deviation(values)
    return f"{np.mean(values):.4f}" + ("" if deviation is None else f" ({deviation:.4f})")


def with_interval(difference: PairedDifference | None, digits: int = 4, remark: str = "") -> str:
    """Return the mean with half its interval, where there are two seeds; bold where the interval leaves out zero."""
    if difference is None:
        return ABSENT
    text = plus_minus(signed(difference.mean, digits), difference.half_width, f".{digits}f") + remark
    return f"**{text}**" if difference.clear else text


def percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f}%" if part is not None and whole else ABSENT


def compact(count: float) -> str:
    """Return three digits: 786k, 1.34M, 124M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{unit}"
    return f"{count:g}"


def span(values: Sequence[int], write: Callable[[int], str] = str) -> str:
    """Return the least and the largest value, `4 to 16`, or the one that all are."""
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], align: str | None = None) -> str:
    """Return a table for GitHub; cells are Markdown already.

    align: l or r for each column; by default the first is to the left, the others to the right.
    """
    # Not padded, as tabulate has it: one longer cell would change every line of a committed table.
    rules = {"l": "---", "r": "---:"}
    ruler = [rules[side] for side in align or "l" + "r" * (len(headers) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headers, ruler, *rows))
