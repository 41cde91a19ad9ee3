"""What every figure shares: its colours, its style, and how it becomes an SVG."""

import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

ROOT = Path(__file__).parent.parent.parent
RESULTS, FIGURES = ROOT / "results", ROOT / "docs" / "figures"
# Name -> its colour in light and in dark mode. Matplotlib draws with the light one; the SVG takes it from a variable.
COLORS = {
    "ink": ("#1f2328", "#e6edf3"),
    "page": ("#ffffff", "#0d1117"),
    "grey": ("#6e7782", "#9198a2"),
    "blue": ("#0969da", "#4493f8"),
    "orange": ("#bc4c00", "#f0883e"),
    "green": ("#1a7f38", "#3fb950"),
}
INK, PAGE, GREY, BLUE, ORANGE, GREEN = (light for light, _ in COLORS.values())
WIDTH = 600  # CSS pixels; a phone shows it at a little more than half of that
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leanqkv",
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that the layout is the same everywhere
    "font.size": 14,
    "axes.titlesize": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    **{f"figure.constrained_layout.{pad}": 0.16 for pad in ("w_pad", "h_pad")},  # inches
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 7,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}

Record = Mapping[str, Any]


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def plot(description: str, height: float, draw: Callable[[Axes], None]) -> str:
    """A Matplotlib figure of one panel as SVG; `height` in CSS pixels."""
    with matplotlib.style.context(["default", STYLE]):
        canvas = Canvas(figsize=(WIDTH / 72, height / 72), layout="constrained")
        axes = canvas.add_subplot()
        draw(axes)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(
        r"(<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>)\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)  # the family is the reader's
    return document(description, WIDTH, height, svg[svg.index(">") + 1 : svg.rindex("</svg>")].strip())


def document(description: str, width: float, height: float, body: str) -> str:
    """A whole SVG whose colours follow the reader's mode, on a background of its own."""

    def variables(mode: int) -> str:
        return " ".join(f"--{name}: {pair[mode]};" for name, pair in COLORS.items())

    for name, (light, _) in COLORS.items():
        body = body.replace(light, f"var(--{name})")
    style = (
        f"svg {{ {variables(0)} font-family: system-ui, 'DejaVu Sans', sans-serif; }}\n"
        f"@media (prefers-color-scheme: dark) {{ svg {{ {variables(1)} }} }}"
    )
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size} role="img">\n'
        f"<title>{description}</title>\n<style>\n{style}\n</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="var(--page)"/>\n{body}\n</svg>\n'
    )
