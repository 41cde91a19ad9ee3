"""How numbers, lists and tables are written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ABSENT = "–"


@dataclass(frozen=True)
class Section:
    """A table with a heading, and with a note below it; the first column holds names."""

    heading: str
    note: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


def signed(value: float, digits: int = 4) -> str:
    """Return the number with its sign, a true minus: −0.0211."""
    return f"{value:+,.{digits}f}".replace("-", "−")


def percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f}%" if part is not None and whole else ABSENT


def compact(count: float) -> str:
    """Return three digits: 786k, 1.34M, 124M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{unit}"
    return str(count)


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


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
