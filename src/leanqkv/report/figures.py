"""The report's figures as inline SVG: text and axes in the page's own color, lines in the page's `--series-N`.

Every figure is drawn twice, wide and narrow, so that its text stays legible on a phone; the page shows one of them.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

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
class GridSeries:
    """An architecture's validation loss by learning rate, and the rates that diverged."""

    label: str
    style: int
    losses: dict[float, float]
    diverged: Sequence[float] = ()


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

    def dash(self, style: int) -> dict[str, Any]:
        return {"linestyle": DASHES[style % len(DASHES)], "linewidth": 2.4 if style == 0 else 1.8}

    def crosses(self, at: Sequence[tuple[float, float]], style: int) -> None:
        """Diverged runs: a cross in the architecture's color, on the upper edge where the loss lies above it."""
        if at:
            top = self.axes.get_ylim()[1]
            xs, ys = [x for x, _ in at], [min(y, top) if np.isfinite(y) else top for _, y in at]
            cross: dict[str, Any] = {"marker": "x", "linestyle": "none", "markersize": 9, "markeredgewidth": 2.2}
            self.axes.plot(xs, ys, color=_SERIES[style % COLORS], clip_on=False, zorder=5, **cross)
            self.legend["diverged"] = Line2D([], [], color=_INK, **cross)


def curves(series: Sequence[Series], measure: Measure, tokens_per_step: int | None) -> Drawing:
    """Draw the measure over training; the first steps run off the edge so that the end can be told apart."""

    def plot(canvas: _Canvas) -> None:
        _lines(canvas, series)
        shown = _settled(series)
        if shown:
            low, high = min(band.low for band in shown), max(band.high for band in shown)
            if measure.better == "lower":
                high = max(band.mean for band in shown)
            else:
                low = min(band.mean for band in shown)
            margin = 0.05 * (high - low) or 0.1
            canvas.axes.set_ylim(low - margin, high + margin)
        for one in series:
            canvas.crosses(one.diverged, one.style)
        canvas.axes.set_ylabel(measure.name)
        _step_axis(canvas)
        if tokens_per_step is not None:
            to_tokens = (partial(np.multiply, tokens_per_step), partial(np.multiply, 1 / tokens_per_step))
            tokens = canvas.axes.secondary_xaxis("top", functions=to_tokens)
            tokens.xaxis.set_major_locator(MaxNLocator(4 if canvas.narrow else 7, steps=ROUND))
            tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
            tokens.set_xlabel("tokens")

    return _draw("loss", plot, f"Line chart: {measure.name} over training steps, one line per architecture.")


def improvement_curves(series: Sequence[Series]) -> Drawing:
    """Draw relative improvement over the baseline in percent; limits leave the noise of the first steps out."""

    def plot(canvas: _Canvas) -> None:
        canvas.axes.axhline(0, color=_INK, linewidth=1.4, zorder=1.5)
        _lines(canvas, series, scale=100)
        shown = _settled(series)
        if shown:
            low = 100 * min(0, *(band.low for band in shown))
            high = 100 * max(0, *(band.high for band in shown))
            margin = 0.06 * (high - low) or 0.1
            canvas.axes.set_ylim(low - margin, high + margin)
        canvas.axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}".replace("-", "−") if y else "0"))
        canvas.axes.set_ylabel("improvement over the baseline, %")
        _step_axis(canvas)

    return _draw(
        "improvement", plot, "Line chart: relative improvement over the baseline in percent over training steps."
    )


def learning_rate_grid(series: Sequence[GridSeries]) -> Drawing:
    """Draw loss against learning rate: a ring on each architecture's best, a cross on the edge where it diverged."""

    def plot(canvas: _Canvas) -> None:
        axes = canvas.axes
        axes.set_xscale("log")
        for one in series:
            rates = sorted(one.losses)
            losses = [one.losses[rate] for rate in rates]
            line = axes.plot(rates, losses, **canvas.look(one.style), **canvas.dash(one.style))
            canvas.legend[one.label] = line[0]
        losses = [loss for one in series for loss in one.losses.values()]
        if losses:
            # A rate far too high must not flatten the rest; its line then leaves over the top.
            best = min(losses)
            top = min(max(losses), best + 5 * (float(np.median(losses)) - best)) if len(losses) > 1 else best
            margin = 0.07 * (top - best) or 0.1
            axes.set_ylim(best - margin, top + margin)
        for one in series:
            if one.losses:
                ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "linestyle": "none"}
                best_rate = min(one.losses, key=one.losses.__getitem__)
                axes.plot([best_rate], [one.losses[best_rate]], color=_SERIES[one.style % COLORS], **ring)
                canvas.legend["best of its line"] = Line2D([], [], color=_INK, **ring)
            canvas.crosses([(rate, np.inf) for rate in one.diverged], one.style)
        axes.xaxis.set_major_locator(FixedLocator(sorted({r for one in series for r in (*one.losses, *one.diverged)})))
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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.set_xlabel("KV cache, bytes per token (bfloat16)")
        axes.set_ylabel("validation loss")

    return _draw("cache", plot, "Scatter plot: final validation loss against KV cache bytes per token.")


def measured_lines(
    name: str, series: Sequence[Series], across: str, up: str, description: str, from_zero: bool = True
) -> Drawing:
    """Draw a quantity against another, from zero unless that would hide it; a point's `step` is its place across."""

    def plot(canvas: _Canvas) -> None:
        _lines(canvas, series)
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
    joined: list[np.ndarray] = []
    centres = []
    for block in blocks.values():
        start = sum(part.shape[1] for part in joined)
        centres.append(start + block.shape[1] / 2)
        missing = ((0, height - len(block)), (0, max(1, round(0.05 * sum(b.shape[1] for b in blocks.values()) / 4))))
        joined.append(np.pad(np.asarray(block, dtype=float), missing, constant_values=np.nan))
    matrix = np.hstack(joined)

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


def _lines(canvas: _Canvas, series: Sequence[Series], scale: float = 1) -> None:
    for one in series:
        steps = [band.step for band in one.points]
        low, high = ([scale * getattr(band, edge) for band in one.points] for edge in ("low", "high"))
        look = canvas.look(one.style)
        line = canvas.axes.plot(
            steps,
            [scale * band.mean for band in one.points],
            markevery=max(1, len(steps) // 12),
            **look,
            **canvas.dash(one.style),
        )
        canvas.axes.fill_between(steps, low, high, color=look["color"], alpha=0.16, linewidth=0)
        canvas.legend[one.label] = line[0]


def _settled(series: Sequence[Series]) -> list[Band]:
    """The points that set the limits: without the first evaluation and the first fifth of the steps."""
    last = max((band.step for one in series for band in one.points), default=0)
    return [band for one in series for band in one.points[1:] if band.step >= last / 5]


def _step_axis(canvas: _Canvas) -> None:
    canvas.axes.margins(x=0.02)
    canvas.axes.xaxis.set_major_locator(MaxNLocator(5 if canvas.narrow else 8, steps=ROUND, integer=True))
    canvas.axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    canvas.axes.set_xlabel("training step")


def _draw(name: str, plot: Callable[[_Canvas], None], description: str) -> Drawing:
    return Drawing(
        _render(f"{name}-wide", plot, description, narrow=False),
        _render(f"{name}-narrow", plot, description, narrow=True),
    )


def _render(name: str, plot: Callable[[_Canvas], None], description: str, narrow: bool) -> str:
    """One version as SVG, 1 unit = 1 CSS pixel at its full size; the salt makes equal input equal bytes."""
    width, plot_height, font = (360, 270, 11.5) if narrow else (900, 380, 13)
    style: dict[str, Any] = {**_STYLE, "font.size": font, "legend.fontsize": font, "svg.hashsalt": name}
    with matplotlib.style.context(["default", style]):
        figure = Figure(layout="constrained")
        canvas = _Canvas(figure.add_subplot(), narrow)
        plot(canvas)
        longest = max(map(len, canvas.legend), default=0)
        columns = max(1, int(width // (0.6 * font * longest + 4.5 * font)))
        rows = -(-len(canvas.legend) // columns)
        figure.set_size_inches(width / 72, (plot_height + rows * 1.55 * font) / 72)
        labels, handles = _row_by_row(list(canvas.legend), columns), _row_by_row(list(canvas.legend.values()), columns)
        if handles:
            figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), transparent=True
        )
    return _inline(buffer.getvalue(), name, description)


def _row_by_row(items: list[Any], columns: int) -> list[Any]:
    """Matplotlib fills legends column by column; this order makes them read along the rows."""
    return [item for column in range(columns) for item in items[column::columns]]


def _inline(svg: str, name: str, description: str) -> str:
    """A Matplotlib SVG document made fit to stand inside a page that holds several of them."""
    svg = svg[svg.index("<svg") :]
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    svg = re.sub(r"^<svg[^>]*>", f'<svg {view_box[0]} role="img" aria-label="{description}">', svg)
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
