"""The figures of an analysis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from leanqkv.compare.statistics import average
from leanqkv.report.figures import Canvas, Drawing, Series, chart, measured_lines

from . import measures
from .measures import SCORES, Architecture, Measure, Model, Record

Figure = tuple[str, Drawing]  # with its caption
Curve = dict[int, float | None]


def drawings(record: Record) -> list[Figure]:
    """Return every figure with its caption."""
    groups, matrices = measures.architectures(record), measures.conditions(record)
    figures = [_by_layer(groups, measure) for measure in measures.layer_measures(record)]
    if any(len(model["training"]) > 1 for model in record["models"].values()):
        figures += [_over_training(groups, measure) for measure in (measures.SPREAD, *matrices.values())]
    figures += [_spectrum(groups, matrix) for matrix in matrices]
    figures += [_head_map(record, score, title) for score, title in SCORES.items()]
    return figures + [figure for place, group in enumerate(groups) for figure in _similarity_maps(group, place)]


def _lines(
    name: str, groups: Sequence[Architecture], curves: Callable[[Model], list[Curve]], caption: str, **axes: Any
) -> Figure:
    """Mean and range of every architecture's curves, of which points without a value are left out."""
    series = []
    for style, group in enumerate(groups):
        drawn = [curve for model in group.models.values() for curve in curves(model)]
        known = [{at: value for at, value in curve.items() if value is not None} for curve in drawn]
        if points := average(dict(enumerate(known))):
            series.append(Series(group.name, style, points))
    return caption, measured_lines(name, series=series, description=caption, **axes)


def _by_layer(groups: Sequence[Architecture], measure: Measure) -> Figure:
    caption = f"{measure.title}, by layer; mean and range over seeds."
    axes = {"across": "layer", "up": measure.unit, "from_zero": False}
    return _lines(measure.name, groups, lambda model: [dict(enumerate(measure.of(model)))], caption, **axes)


def _over_training(groups: Sequence[Architecture], measure: Measure) -> Figure:
    """From the first weights over every checkpoint."""

    def curves(model: Model) -> list[Curve]:
        return [{stage["step"]: measure.mean(stage) for stage in model["training"]}]

    caption = f"{measure.title}, over training; mean over layers, mean and range over seeds."
    axes = {"across": "step", "up": measure.unit, "from_zero": False}
    return _lines(f"{measure.name}-training", groups, curves, caption, **axes)


def _spectrum(groups: Sequence[Architecture], matrix: str) -> Figure:
    """Singular values against their rank, both relative, averaged over layers and models."""

    def curves(model: Model) -> list[Curve]:
        spectra = [layer[matrix]["singular_values"] for layer in model["spectra"] if matrix in layer]
        return [
            {round(100 * rank / max(1, len(spectrum) - 1)): s / spectrum[0] for rank, s in enumerate(spectrum)}
            for spectrum in spectra
            if spectrum[0]
        ]

    caption = f"Singular values of {matrix} over the largest; mean and range over layers and seeds."
    return _lines(f"spectrum-{matrix}", groups, curves, caption, across="rank, %", up="σ / σ₁")


def _head_map(record: Record, score: str, title: str) -> Figure:
    blocks = {}
    for label, model in record["models"].items():
        rows = model["heads"][score]
        blocks[label] = np.full((len(rows), max(map(len, rows))), np.nan)  # layers may differ in their number of heads
        for layer, row in enumerate(rows):
            blocks[label][layer, : len(row)] = row
    caption = f"The {title} score of every head of every model."
    return caption, heat_map(f"map-{title}", blocks, "heads", "layer", f"{title} score", caption)


def _similarity_maps(group: Architecture, place: int) -> Iterator[Figure]:
    """Heads of the first model, since those of two seeds have nothing to do with each other; tokens of all models."""
    for name, models, side, what in (
        ("heads", [group.first], "head", "heads before W_O, of its first model"),
        ("contributions", [group.first], "head", "heads after W_O, of its first model"),
        ("tokens", group.models.values(), "eighth of the text", "tokens, mean over its models"),
    ):
        maps = np.mean([[layer["map"] for layer in model["similarity"][name]] for model in models], axis=0)
        blocks = {f"layer {layer}": block for layer, block in enumerate(maps)}
        caption = f"{group.name}: cosine similarity of {what}, layer by layer."
        yield caption, heat_map(f"map-{name}{place}", blocks, f"{side}, by layer", side, "cosine similarity", caption)


@chart
def heat_map(
    canvas: Canvas, blocks: Mapping[str, np.ndarray], across: str, up: str, measure: str, description: str
) -> str:
    """Draw matrices side by side on one scale of colors, each over its name; row 0 is at the bottom.

    blocks: [rows, columns] each; `across` and `up` name columns and rows, `measure` the quantity.
    """
    height = max(len(block) for block in blocks.values())
    gap = max(1, round(0.05 * sum(block.shape[1] for block in blocks.values()) / 4))
    padded = [
        np.pad(np.asarray(block, dtype=float), ((0, height - len(block)), (0, gap)), constant_values=np.nan)
        for block in blocks.values()
    ]
    ends = np.cumsum([block.shape[1] for block in padded])
    centres = [end - gap - block.shape[1] / 2 for end, block in zip(ends, blocks.values(), strict=True)]
    axes = canvas.axes
    axes.grid(False)
    mesh = axes.pcolormesh(np.ma.masked_invalid(np.hstack(padded)), cmap="viridis")
    axes.figure.colorbar(mesh, ax=axes, label=measure, aspect=30).outline.set_visible(False)
    labels = [label.replace("+", "\n+") for label in blocks]
    axes.set_xticks(centres, labels, rotation=60 if canvas.narrow and len(labels) > 2 else 0)
    axes.set_yticks(np.arange(height) + 0.5, [str(row) for row in range(height)])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    canvas.axes.set(xlabel=across, ylabel=up)
    return description
