"""How numbers and lists are written in tables and sentences."""

from collections.abc import Sequence

ABSENT = "–"


def signed(value: float, digits: int = 4) -> str:
    return f"{value:+,.{digits}f}".replace("-", "−")


def percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f}%" if part is not None and whole else ABSENT


def compact(count: float) -> str:
    """Three digits: 786k, 1.34M, 124M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{unit}"
    return str(count)


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str | None = None) -> str:
    """Return a Markdown table; `align` has a letter for each column, by default l for the first and r for the rest."""
    align = align or "l" + "r" * (len(headers) - 1)
    ruler = ["---" if side == "l" else "---:" for side in align]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headers, ruler, *rows))
