"""The report's figures as inline SVG: text and axes in the page's own color, lines in the page's `--series-N`.

Every figure is drawn twice, wide and narrow, so that its text stays legible on a phone; the page shows one of them.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from operator import attrgetter
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator, StrMethodFormatter

from ..compare.measure import Measure
from ..compare.statistics import Band

COLORS = 8  # `--series-0` .. `--series-7` in report.css; 0 is the baseline
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (7, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vP*Xh"
ROUND = [1, 2, 2.5, 5, 10]  # what distances between ticks may be, times a power of ten

# Colors Matplotlib can write and nothing else in a figure has; they become CSS in `_inline`.
_INK = "#fedc00"
_SERIES = tuple(f"#fedc{index + 1:02x}" for index in range(COLORS))
_PAGE = "#fedcff"

_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may have dollars
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that the layout is the same everywhere
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@dataclass(frozen=True)
class Series:
    """An architecture's line. `style` is its place in the comparison: the same look in every figure."""

    label: str
    style: int
    points: Sequence[Band]
    diverged: Sequence[tuple[float, float]] = ()  # where runs stopped: (step, last loss)


@dataclass(frozen=True)
class Drawing:
    """One figure in its two versions."""

    wide: str
    narrow: str


@dataclass
class _Canvas:
    """The axes being drawn on, and the legend gathered on the way."""

    axes: Axes
    narrow: bool
    legend: dict[str, Any] = field(default_factory=dict)

    def look(self, style: int) -> dict[str, Any]:
        return {"color": _SERIES[style % COLORS], "marker": MARKERS[style % len(MARKERS)]}

    def line(self, series: Series, xs: Sequence[float], ys: Sequence[float], **options: Any) -> None:
        dash = {"linestyle": DASHES[series.style % len(DASHES)], "linewidth": 1.8 if series.style else 2.4}
        [self.legend[series.label]] = self.axes.plot(xs, ys, **options, **self.look(series.style), **dash)

    def means(self, series: Sequence[Series]) -> None:
        for one in series:
            steps, means = [band.step for band in one.points], [band.mean for band in one.points]
            self.line(one, steps, means, markevery=max(1, len(steps) // 12))

    def bands(self, series: Sequence[Series]) -> None:
        """Draw the means as lines, and the ranges around them."""
        self.means(series)
        for one in series:
            steps, low, high = ([getattr(band, name) for band in one.points] for name in ("step", "low", "high"))
            color = self.look(one.style)["color"]
            self.axes.fill_between(steps, low, high, facecolor=(color, 0.13), edgecolor=(color, 0.6), linewidth=0.7)

    def mark(self, label: str, xs: Sequence[float], ys: Sequence[float], style: int, **look: Any) -> None:
        """Draw marks in the architecture's color; in the legend they have the ink's."""
        self.axes.plot(xs, ys, color=_SERIES[style % COLORS], linestyle="none", **look)
        self.legend[label] = Line2D([], [], color=_INK, linestyle="none", **look)

    def crosses(self, series: Series) -> None:
        """Draw diverged runs, on the upper edge where the loss lies above it."""
        if series.diverged:
            top = self.axes.get_ylim()[1]
            xs, ys = zip(*((x, min(y, top) if np.isfinite(y) else top) for x, y in series.diverged), strict=True)
            cross: dict[str, Any] = {"marker": "x", "markersize": 9, "markeredgewidth": 2.2}
            self.mark("diverged", xs, ys, series.style, clip_on=False, zorder=5, **cross)

    def limits(self, low: float, high: float, margin: float) -> None:
        margin = margin * (high - low) or 0.1
        self.axes.set_ylim(low - margin, high + margin)

    def step_axis(self) -> None:
        self.axes.margins(x=0.02)
        self.axes.xaxis.set_major_locator(MaxNLocator(5 if self.narrow else 8, steps=ROUND, integer=True))
        self.axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        self.axes.set_xlabel("training step")


def curves(series: Sequence[Series], measure: Measure, tokens_per_step: int | None) -> Drawing:
    """Draw the measure's means over training; the first steps may run off the edge, see `edge_note`."""

    def plot(canvas: _Canvas) -> None:
        canvas.means(series)
        if shown := [band.mean for one in series for band in _settled(one)]:
            canvas.limits(min(shown), max(shown), 0.05)
        for one in series:
            canvas.crosses(one)
        canvas.axes.set_ylabel(measure.name)
        canvas.step_axis()
        if tokens_per_step is not None:
            to_tokens = (partial(np.multiply, tokens_per_step), partial(np.multiply, 1 / tokens_per_step))
            tokens = canvas.axes.secondary_xaxis("top", functions=to_tokens)
            tokens.xaxis.set_major_locator(MaxNLocator(4 if canvas.narrow else 7, steps=ROUND))
            tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
            tokens.set_xlabel("tokens")

    return _draw("loss", plot, f"Line chart: {measure.name} over training steps, one line per architecture.")


def difference_curves(series: Sequence[Series], measure: Measure) -> Drawing:
    """Draw differences to the baseline and their intervals; the last evaluation's intervals are whole."""

    def plot(canvas: _Canvas) -> None:
        canvas.axes.axhline(0, color=_INK, linewidth=1.4, zorder=1.5)
        canvas.bands(series)
        means = [band.mean for one in series for band in _settled(one)]
        ends = [end for one in series for end in (one.points[-1].low, one.points[-1].high)]
        canvas.limits(min(0, *means, *ends), max(0, *means, *ends), 0.06)
        canvas.axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}".replace("-", "−") if y else "0"))
        canvas.axes.set_ylabel(f"difference in {measure.name}")
        canvas.step_axis()

    description = f"Line chart: difference in {measure.name} to the baseline over training steps."
    return _draw("difference", plot, description)


def learning_rate_grid(series: Sequence[Series]) -> Drawing:
    """Draw loss against learning rate: a ring on each architecture's best, a cross on the edge where it diverged.

    A point's `step` is its learning rate.
    """
    losses = [point.mean for one in series for point in one.points]

    def plot(canvas: _Canvas) -> None:
        axes = canvas.axes
        axes.set_xscale("log")
        for one in series:
            points = sorted(one.points, key=attrgetter("step"))
            canvas.line(one, [point.step for point in points], [point.mean for point in points])
        if losses:
            # A rate far too high must not flatten the rest; its line then leaves over the top.
            best = min(losses)
            canvas.limits(best, min(max(losses), best + 5 * (float(np.median(losses)) - best)), 0.07)
        for one in series:
            if one.points:
                best_point = min(one.points, key=attrgetter("mean"))
                ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none"}
                canvas.mark("best of its line", [best_point.step], [best_point.mean], one.style, **ring)
            canvas.crosses(one)
        rates = {point.step for one in series for point in one.points} | {x for one in series for x, _ in one.diverged}
        axes.xaxis.set_major_locator(FixedLocator(sorted(rates)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        axes.margins(x=0.08)
        axes.set_xlabel("peak learning rate")
        axes.set_ylabel("validation loss")

    return _draw("grid", plot, "Line chart: validation loss against peak learning rate, one line per architecture.")


def cache_scatter(series: Sequence[Series]) -> Drawing:
    """Draw loss against cache size, down and to the left is better; a line's one point has KV bytes as its `step`."""
    sizes = [one.points[0].step for one in series]
    right = 1.12 * max(sizes, default=1)

    def plot(canvas: _Canvas) -> None:
        axes = canvas.axes
        for place, one in enumerate(series):
            point = one.points[0]
            if one.style == 0:
                axes.axhline(point.mean, color=_INK, alpha=0.6, linewidth=1, linestyle=(0, (4, 3)))
            # Equal caches stand side by side, so that no mark hides another.
            equal = sizes.count(point.step)
            shift = sizes[:place].count(point.step) - (equal - 1) / 2
            gap = min(0.035 if canvas.narrow else 0.016, 0.2 / equal)  # many of them stay within the axes
            at = point.step + shift * right * gap
            reach = [[point.mean - point.low], [point.high - point.mean]]
            look = canvas.look(one.style) | {"markersize": 9, "markeredgecolor": _PAGE, "markeredgewidth": 0.8}
            drawn = axes.errorbar([at], [point.mean], reach, linestyle="none", capsize=4, **look)
            canvas.legend[one.label] = drawn.lines[0]
        axes.set_xlim(0, right)
        axes.margins(y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(4 if canvas.narrow else 7, steps=ROUND, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel("KV cache, bytes per token (bfloat16)")
        axes.set_ylabel("validation loss")

    return _draw("cache", plot, "Scatter plot: final validation loss against KV cache bytes per token.")


def measured_lines(
    name: str, series: Sequence[Series], across: str, up: str, description: str, from_zero: bool = True
) -> Drawing:
    """Draw a quantity against another, from zero unless that would hide it; a point's `step` is its place across."""

    def plot(canvas: _Canvas) -> None:
        canvas.bands(series)
        points = [point for one in series for point in one.points]
        if from_zero:
            canvas.axes.set_xlim(0, 1.05 * max(point.step for point in points))
            canvas.axes.set_ylim(0, 1.05 * max(point.high for point in points))
        canvas.axes.xaxis.set_major_locator(MaxNLocator(4 if canvas.narrow else 8, steps=ROUND, integer=True))
        prefixed = EngFormatter(sep="")
        for axis in (canvas.axes.xaxis, canvas.axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda at, _: prefixed(at) if at >= 1 else f"{at:g}"))
        canvas.axes.set_xlabel(across)
        canvas.axes.set_ylabel(up)

    return _draw(name, plot, description)


def frontier_lines(name: str, series: Sequence[Series], description: str) -> Drawing:
    """Draw loss above the source's against the share of its cache in percent, a point's `step`; small losses wide."""

    def plot(canvas: _Canvas) -> None:
        canvas.bands(series)
        canvas.axes.axhline(0, color=_INK, alpha=0.6, linewidth=1, linestyle=(0, (4, 3)))
        # Linear up to a hundredth of a nat, where most of what is worth choosing lies, and by powers of ten above.
        canvas.axes.set_yscale("symlog", linthresh=0.01, linscale=1.0)
        canvas.axes.yaxis.set_major_locator(FixedLocator([-0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3]))
        canvas.axes.yaxis.set_minor_locator(NullLocator())
        canvas.axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        canvas.axes.xaxis.set_major_locator(MaxNLocator(5 if canvas.narrow else 10, steps=ROUND, integer=True))
        canvas.axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
        canvas.axes.set_xlabel("KV cache, share of the source's in bfloat16")
        canvas.axes.set_ylabel("loss above the source's, nats")

    return _draw(name, plot, description)


def stacked_bars(name: str, bars: dict[str, dict[str, float]], along: str, description: str) -> Drawing:
    """Draw one bar for every label, of parts that add up; `along` names the quantity."""

    def plot(canvas: _Canvas) -> None:
        names = [label.replace("+", "\n+") if canvas.narrow else label for label in bars]
        ends = dict.fromkeys(bars, 0.0)
        for style, part in enumerate(next(iter(bars.values()), {})):
            sizes = [parts[part] for parts in bars.values()]
            color = _SERIES[style % COLORS]
            drawn = canvas.axes.barh(names, sizes, left=list(ends.values()), color=color, height=0.6)
            canvas.legend[part] = drawn
            ends = {label: ends[label] + bars[label][part] for label in bars}
        canvas.axes.invert_yaxis()
        canvas.axes.set_xlabel(along)

    return _draw(name, plot, description)


def heat_map(name: str, blocks: dict[str, np.ndarray], across: str, up: str, measure: str, description: str) -> Drawing:
    """Draw matrices side by side on one scale of colors, each over its name; row 0 is at the bottom.

    blocks: [rows, columns] each; `across` and `up` name columns and rows, `measure` the quantity.
    """
    height = max(len(block) for block in blocks.values())
    gap = max(1, round(0.05 * sum(block.shape[1] for block in blocks.values()) / 4))
    padded = [
        np.pad(np.asarray(block, dtype=float), ((0, height - len(block)), (0, gap)), constant_values=np.nan)
        for block in blocks.values()
    ]
    matrix = np.hstack(padded)
    ends = np.cumsum([block.shape[1] for block in padded])
    centres = [end - gap - block.shape[1] / 2 for end, block in zip(ends, blocks.values(), strict=True)]

    def plot(canvas: _Canvas) -> None:
        axes = canvas.axes
        axes.grid(False)
        mesh = axes.pcolormesh(np.ma.masked_invalid(matrix), cmap="viridis")
        bar = axes.figure.colorbar(mesh, ax=axes, label=measure, aspect=30)
        bar.outline.set_visible(False)
        labels = [label.replace("+", "\n+") for label in blocks]
        axes.set_xticks(centres, labels, rotation=60 if canvas.narrow and len(labels) > 2 else 0)
        axes.set_yticks(np.arange(height) + 0.5, [str(row) for row in range(height)])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel(across)
        axes.set_ylabel(up)

    return _draw(name, plot, description)


def edge_note(series: Sequence[Series]) -> str:
    """Return the sentence for a caption of `curves` that leave the figure; empty where all of them are shown."""
    beyond = any(len(_settled(one)) < len(one.points) for one in series)
    return " The first evaluations, where every model is still bad, lie beyond the edge." if beyond else ""


def _settled(series: Series) -> Sequence[Band]:
    """The points that set the limits: without the first fifth of the steps, but three quarters of them at least."""
    early = sum(band.step < series.points[-1].step / 5 for band in series.points)
    return series.points[min(early, len(series.points) // 4) :]


def _draw(name: str, plot: Callable[[_Canvas], None], description: str) -> Drawing:
    versions = {
        version: _inline(_render(f"{name}-{version}", plot, version == "narrow"), f"{name}-{version}", description)
        for version in ("wide", "narrow")
    }
    return Drawing(**versions)


def _render(name: str, plot: Callable[[_Canvas], None], narrow: bool) -> str:
    """One version as SVG, 1 unit = 1 CSS pixel at its full size; the salt makes equal input equal bytes."""
    width, plot_height, font = (360, 270, 11.5) if narrow else (900, 380, 13)
    style: dict[str, Any] = {**_STYLE, "font.size": font, "legend.fontsize": font, "svg.hashsalt": name}
    buffer = io.StringIO()
    with matplotlib.style.context(["default", style]):
        figure = Figure(layout="constrained")
        canvas = _Canvas(figure.add_subplot(), narrow)
        plot(canvas)
        longest = max(map(len, canvas.legend), default=0)
        columns = max(1, int(width // (0.6 * font * longest + 4.5 * font)))
        rows = -(-len(canvas.legend) // columns)
        figure.set_size_inches(width / 72, (plot_height + rows * 1.55 * font) / 72)
        if entries := list(canvas.legend.items()):
            # Matplotlib fills legends column by column; in this order they read along the rows.
            entries = [entry for column in range(columns) for entry in entries[column::columns]]
            labels, handles = zip(*entries, strict=True)
            figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    return buffer.getvalue()


def _inline(svg: str, name: str, description: str) -> str:
    """A Matplotlib SVG document made fit to stand inside a page that holds several of them."""
    svg = svg[svg.index("<svg") :]
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    opening = f'<svg {view_box[0]} role="img" aria-label="{escape(description)}">'
    svg = re.sub(r"^<svg[^>]*>", lambda _: opening, svg)
    svg = re.sub(r"(<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>)\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)  # the family is the page's
    svg = svg.replace(_INK, "currentColor").replace(_PAGE, "var(--page)")
    for index, color in enumerate(_SERIES):
        svg = svg.replace(color, f"var(--series-{index})")
    return svg.strip()
