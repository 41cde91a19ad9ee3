"""The report's figures as inline SVG: text and axes in the page's own color, lines in the page's `--series-N`.

Every figure is drawn twice, wide and narrow, so that its text stays legible on a phone; the page shows one of them.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from html import escape
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec

import numpy as np

from ..compare.measure import Measure
from ..compare.statistics import Band

COLORS = 8  # `--series-0` .. `--series-7` in report.css; 0 is the baseline
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (7, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vP*Xh"
ROUND = [1, 2, 2.5, 5, 10]  # what distances between ticks may be, times a power of ten
PREFIXES = {"G": 1e9, "M": 1e6, "k": 1e3}

P = ParamSpec("P")

# Colors Matplotlib can write and nothing else in a figure has; they become CSS in `_inline`.
_INK = "#fedc00"
_SERIES = tuple(f"#fedc{index + 1:02x}" for index in range(COLORS))
_PAGE = "#fedcff"

_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may have dollars
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so that the layout is the same everywhere
    **dict.fromkeys((f"{part}.color" for part in ("text", "grid", "xtick", "ytick")), _INK),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor"), _INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
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

    @property
    def settled(self) -> Sequence[Band]:
        """The points that set the limits: without the first fifth of the steps, but three quarters of them at least."""
        early = sum(band.step < self.points[-1].step / 5 for band in self.points)
        return self.points[min(early, len(self.points) // 4) :]


@dataclass(frozen=True)
class Drawing:
    """One figure in its two versions."""

    wide: str
    narrow: str


@dataclass
class Canvas:
    """The axes being drawn on, and the legend gathered on the way.

    library: Matplotlib, which is imported where a figure is drawn: tables do without it.
    """

    axes: Any
    narrow: bool
    library: Any
    legend: dict[str, Any] = field(default_factory=dict)

    def look(self, style: int) -> dict[str, Any]:
        return {"color": _SERIES[style % COLORS], "marker": MARKERS[style % len(MARKERS)]}

    def means(self, series: Sequence[Series]) -> None:
        for one in series:
            steps, means = [band.step for band in one.points], [band.mean for band in one.points]
            dash = {"linestyle": DASHES[one.style % len(DASHES)], "linewidth": 1.8 if one.style else 2.4}
            dash["markevery"] = max(1, len(steps) // 12)
            [self.legend[one.label]] = self.axes.plot(steps, means, **self.look(one.style), **dash)

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
        self.legend[label] = self.library.lines.Line2D([], [], color=_INK, linestyle="none", **look)

    def crosses(self, series: Series) -> None:
        """Draw diverged runs, on the upper edge where the loss lies above it."""
        if series.diverged:
            top = self.axes.get_ylim()[1]
            xs, ys = zip(*((x, min(y, top) if np.isfinite(y) else top) for x, y in series.diverged), strict=True)
            cross: dict[str, Any] = {"marker": "x", "markersize": 9, "markeredgewidth": 2.2}
            self.mark("diverged", xs, ys, series.style, clip_on=False, zorder=5, **cross)

    def point(self, series: Series, x: float) -> None:
        """Draw the one point of a series at x, with its range."""
        point = series.points[0]
        reach = [[point.mean - point.low], [point.high - point.mean]]
        look = self.look(series.style) | {"markersize": 9, "markeredgecolor": _PAGE, "markeredgewidth": 0.8}
        drawn = self.axes.errorbar([x], [point.mean], reach, linestyle="none", capsize=4, **look)
        self.legend[series.label] = drawn.lines[0]

    def limits(self, values: Sequence[float], margin: float) -> None:
        """Show these values, and as much more of their range on either side."""
        low, high = min(values), max(values)
        margin = margin * (high - low) or 0.1
        self.axes.set_ylim(low - margin, high + margin)

    def ticks(self, axis: Any, most: tuple[int, int], text: Any, **options: Any) -> None:
        """Set ticks at round numbers, at most so many in the narrow and the wide version, and their text."""
        axis.set_major_locator(self.library.ticker.MaxNLocator(most[not self.narrow], steps=ROUND, **options))
        axis.set_major_formatter(text)

    def ticks_at(self, axis: Any, places: Sequence[float], text: Any) -> None:
        axis.set_major_locator(self.library.ticker.FixedLocator(places))
        axis.set_minor_locator(self.library.ticker.NullLocator())
        axis.set_major_formatter(text)

    def step_axis(self, up: str) -> None:
        self.axes.margins(x=0.02)
        self.ticks(self.axes.xaxis, (5, 8), "{x:,.0f}", integer=True)
        self.axes.set(xlabel="training step", ylabel=up)


def chart(plot: Callable[Concatenate[Canvas, P], str]) -> Callable[Concatenate[str, P], Drawing]:
    """Make a function that returns a drawing, of its name and the other arguments, of one that draws on a canvas.

    plot: returns the figure's description; the names of a page's figures differ.
    """

    @wraps(plot)
    def draw(name: str, *arguments: P.args, **options: P.kwargs) -> Drawing:
        def version(width: str) -> str:
            return _svg(f"{name}-{width}", width == "narrow", lambda canvas: plot(canvas, *arguments, **options))

        return Drawing(version("wide"), version("narrow"))

    return draw


@chart
def curves(canvas: Canvas, series: Sequence[Series], measure: Measure, tokens_per_step: int | None) -> str:
    """Draw the measure's means over training; the first steps may run off the edge, see `edge_note`."""
    canvas.means(series)
    if shown := [band.mean for one in series for band in one.settled]:
        canvas.limits(shown, 0.05)
    for one in series:
        canvas.crosses(one)
    canvas.step_axis(measure.name)
    if tokens_per_step is not None:
        to_tokens = (partial(np.multiply, tokens_per_step), partial(np.multiply, 1 / tokens_per_step))
        tokens = canvas.axes.secondary_xaxis("top", functions=to_tokens)
        canvas.ticks(tokens.xaxis, (4, 7), _prefixed)
        tokens.set_xlabel("tokens")
    return f"Line chart: {measure.name} over training steps, one line per architecture."


@chart
def difference_curves(canvas: Canvas, series: Sequence[Series], measure: Measure) -> str:
    """Draw differences to the baseline and their intervals; the last evaluation's intervals are whole."""
    canvas.axes.axhline(0, color=_INK, linewidth=1.4, zorder=1.5)
    canvas.bands(series)
    means = [band.mean for one in series for band in one.settled]
    canvas.limits([0, *means, *(end for one in series for end in (one.points[-1].low, one.points[-1].high))], 0.06)
    canvas.axes.yaxis.set_major_formatter(lambda y, _: f"{y:+g}".replace("-", "−") if y else "0")
    canvas.step_axis(f"difference in {measure.name}")
    return f"Line chart: difference in {measure.name} to the baseline over training steps."


@chart
def learning_rate_grid(canvas: Canvas, series: Sequence[Series]) -> str:
    """Draw loss against learning rate: a ring on each architecture's best, a cross on the edge where it diverged.

    A point's `step` is its learning rate.
    """
    canvas.axes.set_xscale("log")
    canvas.means(series)
    if losses := [point.mean for one in series for point in one.points]:
        # A rate far too high must not flatten the rest; its line then leaves over the top.
        best = min(losses)
        canvas.limits([best, min(max(losses), best + 5 * (float(np.median(losses)) - best))], 0.07)
    for one in series:
        if one.points:
            best_point = min(one.points, key=attrgetter("mean"))
            ring = {"marker": "o", "markersize": 13, "markerfacecolor": "none"}
            canvas.mark("best of its line", [best_point.step], [best_point.mean], one.style, **ring)
        canvas.crosses(one)
    rates = {point.step for one in series for point in one.points} | {x for one in series for x, _ in one.diverged}
    canvas.ticks_at(canvas.axes.xaxis, sorted(rates), lambda rate, _: f"{rate:g}")
    canvas.axes.margins(x=0.08)
    canvas.axes.set(xlabel="peak learning rate", ylabel="validation loss")
    return "Line chart: validation loss against peak learning rate, one line per architecture."


@chart
def cache_scatter(canvas: Canvas, series: Sequence[Series]) -> str:
    """Draw loss against cache size, down and to the left is better; a line's one point has KV bytes as its `step`."""
    sizes = [one.points[0].step for one in series]
    right = 1.12 * max(sizes, default=1)
    for place, one in enumerate(series):
        point = one.points[0]
        if one.style == 0:
            canvas.axes.axhline(point.mean, color=_INK, alpha=0.6, linewidth=1, linestyle=(0, (4, 3)))
        # Equal caches stand side by side, so that no mark hides another.
        equal = sizes.count(point.step)
        shift = sizes[:place].count(point.step) - (equal - 1) / 2
        gap = min(0.035 if canvas.narrow else 0.016, 0.2 / equal)  # many of them stay within the axes
        canvas.point(one, point.step + shift * right * gap)
    canvas.axes.set_xlim(0, right)
    canvas.axes.margins(y=0.12)
    canvas.ticks(canvas.axes.xaxis, (4, 7), "{x:,.0f}", integer=True)
    canvas.axes.set(xlabel="KV cache, bytes per token (bfloat16)", ylabel="validation loss")
    return "Scatter plot: final validation loss against KV cache bytes per token."


@chart
def published_scatter(canvas: Canvas, series: Sequence[Series], metric: str) -> str:
    """Draw our difference to the baseline, in percent, against the published one, a point's `step`."""
    for axis in (canvas.axes.axhline, canvas.axes.axvline):
        axis(0, color=_INK, alpha=0.6, linewidth=1, linestyle=(0, (4, 3)))
    for one in series:
        canvas.point(one, one.points[0].step)
    canvas.axes.margins(x=0.08, y=0.12)
    canvas.ticks(canvas.axes.xaxis, (4, 7), "{x:+g}")
    canvas.axes.yaxis.set_major_formatter("{x:+g}")
    canvas.axes.set(xlabel=f"published: {metric}, difference to the baseline, %", ylabel="here, %")
    return f"Scatter plot: the difference in {metric} to the baseline here against the published one."


@chart
def measured_lines(
    canvas: Canvas, series: Sequence[Series], across: str, up: str, description: str, from_zero: bool = True
) -> str:
    """Draw a quantity against another, from zero unless that would hide it; a point's `step` is its place across."""
    canvas.bands(series)
    points = [point for one in series for point in one.points]
    if from_zero:
        canvas.axes.set_xlim(0, 1.05 * max(point.step for point in points))
        canvas.axes.set_ylim(0, 1.05 * max(point.high for point in points))
    canvas.ticks(canvas.axes.xaxis, (4, 8), _prefixed, integer=True)
    canvas.axes.yaxis.set_major_formatter(_prefixed)
    canvas.axes.set(xlabel=across, ylabel=up)
    return description


@chart
def frontier_lines(canvas: Canvas, series: Sequence[Series], across: str, unit: str = "") -> str:
    """Draw loss above the source's against what it is lost for, a point's `step`; small losses wide."""
    canvas.bands(series)
    canvas.axes.axhline(0, color=_INK, alpha=0.6, linewidth=1, linestyle=(0, (4, 3)))
    # Linear up to a hundredth of a nat, where most of what is worth choosing lies, and by powers of ten above.
    canvas.axes.set_yscale("symlog", linthresh=0.01, linscale=1.0)
    canvas.ticks_at(canvas.axes.yaxis, [-0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3], "{x:g}")
    canvas.ticks(canvas.axes.xaxis, (5, 10), f"{{x:g}}{unit}", integer=True)
    canvas.axes.set(xlabel=across, ylabel="loss above the source's, nats")
    return f"Loss above the source's against {across}, one line per kind of reduction and precision."


@chart
def stacked_bars(canvas: Canvas, bars: Mapping[str, Mapping[str, float]], along: str, description: str) -> str:
    """Draw one bar for every label, of parts that add up; `along` names the quantity."""
    names = [label.replace("+", "\n+") if canvas.narrow else label for label in bars]
    ends = np.zeros(len(bars))
    for style, part in enumerate(next(iter(bars.values()), {})):
        sizes = np.array([parts[part] for parts in bars.values()])
        canvas.legend[part] = canvas.axes.barh(names, sizes, left=ends, color=_SERIES[style % COLORS], height=0.6)
        ends = ends + sizes
    canvas.axes.invert_yaxis()
    canvas.axes.set_xlabel(along)
    return description


def edge_note(series: Sequence[Series]) -> str:
    """Return the sentence for a caption of `curves` that leave the figure; empty where all of them are shown."""
    beyond = any(len(one.settled) < len(one.points) for one in series)
    return " The first evaluations, where every model is still bad, lie beyond the edge." if beyond else ""


def _prefixed(value: float, place: int | None = None) -> str:
    """The text of a tick: 2.5k, 1M."""
    letter, size = next((one for one in PREFIXES.items() if value >= one[1]), ("", 1))
    return f"{value / size:g}{letter}"


def _svg(name: str, narrow: bool, plot: Callable[[Canvas], str]) -> str:
    """One version as SVG, 1 unit = 1 CSS pixel at its full size; the salt makes equal input equal bytes."""
    import matplotlib.figure
    import matplotlib.style

    width, plot_height, font = (360, 270, 11.5) if narrow else (900, 380, 13)
    style: dict[str, Any] = {**_STYLE, "font.size": font, "legend.fontsize": font, "svg.hashsalt": name}
    buffer = io.StringIO()
    with matplotlib.style.context(["default", style]):
        figure = matplotlib.figure.Figure(layout="constrained")
        canvas = Canvas(figure.add_subplot(), narrow, matplotlib)
        description = plot(canvas)
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
    return _inline(buffer.getvalue(), name, description)


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
