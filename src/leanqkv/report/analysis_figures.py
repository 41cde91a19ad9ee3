"""The figures of an analysis."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..compare.statistics import average
from .figures import Drawing, Series, heat_map, measured_lines

Model = Mapping[str, Any]
Groups = Sequence[tuple[str, Sequence[Model]]]  # architectures and their models


def drawings(record: Mapping[str, Any], groups: Groups) -> list[tuple[str, Drawing]]:
    """Each with its caption."""

    def lines(name: str, values: Callable[[Model], Sequence[float]], up: str, caption: str) -> tuple[str, Drawing]:
        series = [
            Series(label, style, average({i: dict(enumerate(values(model))) for i, model in enumerate(models)}))
            for style, (label, models) in enumerate(groups)
        ]
        return caption, measured_lines(name, series, "layer", up, caption, from_zero=False)

    over = "mean and range over seeds."
    found = []
    if all(model["probe"] for model in record["models"].values()):
        caption = f"Linear probe on every layer's output, {over}"
        found.append(lines("probe", lambda m: m["probe"]["losses"], "validation loss", caption))
    for name, caption in (
        ("heads", "Cosine similarity of two heads' outputs before W_O"),
        ("contributions", "Cosine similarity of what two heads add to the output, after W_O"),
        ("tokens", "Cosine similarity of two tokens of a text"),
    ):
        values = _similarity(name)
        found.append(lines(f"similar-{name}", values, "cosine similarity", f"{caption}, by layer; {over}"))
    spread = f"Spread of the attention logits, by layer; {over}"
    found.append(lines("spread", lambda m: m["logit_spread"], "standard deviation", spread))
    found += _over_training(groups)
    found += _spectra(groups)
    found += _head_maps(record)
    found += _similarity_maps(groups)
    return found


def _similarity(name: str) -> Callable[[Model], list[float]]:
    return lambda model: [at["mean"] for at in model["similarity"][name]]


def _over_training(groups: Groups) -> list[tuple[str, Drawing]]:
    """From the first weights over every checkpoint; none where there is nothing between start and end."""
    if not any(len(model["training"]) > 1 for _, models in groups for model in models):
        return []
    over = "mean over layers; mean and range over seeds."

    def drawn(name: str, value: Callable[[Model], float | None], up: str, what: str) -> tuple[str, Drawing]:
        series = []
        for style, (label, models) in enumerate(groups):
            curves = [{at["step"]: value(at) for at in model["training"]} for model in models]
            known = [{step: found for step, found in curve.items() if found is not None} for curve in curves]
            if points := average(dict(enumerate(known))):
                series.append(Series(label, style, points))
        caption = f"{what} over training, {over}"
        return caption, measured_lines(name, series, "step", up, caption, from_zero=False)

    def condition(matrix: str) -> Callable[[Model], float | None]:
        def mean(stage: Model) -> float | None:
            logarithms = [np.log10(layer[matrix]) for layer in stage["condition"] if layer.get(matrix)]
            return float(np.mean(logarithms)) if logarithms else None

        return mean

    stages = [stage for _, models in groups for model in models for stage in model["training"]]
    matrices = dict.fromkeys(name for stage in stages for layer in stage["condition"] for name in layer)
    found = [
        drawn(
            "spread-training",
            lambda stage: float(np.mean(stage["logit_spread"])),
            "standard deviation",
            "Spread of the attention logits",
        )
    ]
    for matrix in matrices:
        found.append(drawn(f"condition-{matrix}", condition(matrix), "log₁₀ κ", f"Condition number of {matrix}"))
    return found


def _spectra(groups: Groups) -> list[tuple[str, Drawing]]:
    """Singular values against their rank, both relative, averaged over layers and models."""
    names = dict.fromkeys(name for _, models in groups for m in models for layer in m["spectra"] for name in layer)
    found = []
    for name in names:
        series = []
        for style, (label, models) in enumerate(groups):
            matrices = [layer[name]["singular_values"] for m in models for layer in m["spectra"] if name in layer]
            curves = [
                {round(100 * i / max(1, len(values) - 1)): value / values[0] for i, value in enumerate(values)}
                for values in matrices
                if values[0]
            ]
            if curves:
                series.append(Series(label, style, average(dict(enumerate(curves)))))
        caption = f"Singular values of {name} over the largest; mean and range over layers and seeds."
        found.append((caption, measured_lines(f"spectrum-{name}", series, "rank, %", "σ / σ₁", caption)))
    return found


def _head_maps(record: Mapping[str, Any]) -> list[tuple[str, Drawing]]:
    found = []
    for score in ("previous_token", "induction", "matching"):
        blocks = {label: _padded(model["heads"][score]) for label, model in record["models"].items()}
        named = score.replace("_", "-")
        caption = f"The {named} score of every head of every model."
        found.append((caption, heat_map(f"map-{named}", blocks, "heads", "layer", f"{named} score", caption)))
    return found


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Layers may have different numbers of heads."""
    width = max(map(len, rows))
    return np.array([[*row, *[np.nan] * (width - len(row))] for row in rows])


def _similarity_maps(groups: Groups) -> list[tuple[str, Drawing]]:
    """Of each architecture's first model, since heads of two seeds have nothing to do with each other; tokens' of the
    mean over all its models."""
    found = []
    for place, (label, models) in enumerate(groups):
        for name, which in (("heads", "before"), ("contributions", "after")):
            maps = _maps(models[0], name)
            caption = f"{label}: cosine similarity of heads {which} W_O, layer by layer, of its first model."
            drawn = heat_map(f"map-{name}{place}", maps, "head, by layer", "head", "cosine similarity", caption)
            found.append((caption, drawn))
        means = {
            layer: np.mean([_maps(m, "tokens")[layer] for m in models], axis=0) for layer in _maps(models[0], "tokens")
        }
        caption = f"{label}: cosine similarity of tokens, by eighths of the text, layer by layer, mean over its models."
        along = "eighth of the text, by layer"
        drawn = heat_map(f"map-tokens{place}", means, along, "eighth of the text", "cosine similarity", caption)
        found.append((caption, drawn))
    return found


def _maps(model: Model, name: str) -> dict[str, np.ndarray]:
    return {f"layer {layer}": np.array(at["map"]) for layer, at in enumerate(model["similarity"][name])}
