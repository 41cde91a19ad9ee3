"""The figure of the in-context regression, from its record alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..report import Record, plain_axes
from .measure import measured

_COLORS = {"attention": "#a8480f", "first_value": "#1b5e8c"}
_LABELS = {"attention": "attention", "first_value": "with the first value"}


def draw(record: Record, figure: Any) -> None:
    """Draw the losses by a, by n, by W_0, and trained freely."""
    entries = measured(record)
    figure.set_size_inches(11, 8)
    grid = plain_axes(figure, 2, 2)
    _draw_rows(grid[0, 0], entries["by_rows"])
    _draw_gaps(grid[0, 1], entries["curves"], entries["grid"])
    _draw_priors(grid[1, 0], entries["priors"], entries["reversed"])
    _draw_training(grid[1, 1], entries["training"])


def _draw_rows(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    last = entries[-1]
    shown = [entry for entry in entries if (entry["d"], entry["n"]) == (last["d"], last["n"])]
    rows = [entry["rows"] for entry in shown]
    for key, color in _COLORS.items():
        axes.plot(rows, [entry[key]["theory"] for entry in shown], color=color, label=f"{_LABELS[key]}, closed form")
        losses = [entry[key]["loss"] for entry in shown]
        axes.plot(rows, losses, "o" if key == "attention" else "s", color=color, label=f"{_LABELS[key]}, optimised")
    axes.set_xticks(rows)
    axes.set_xlabel("a, rows of A: entries that hold x")
    axes.set_ylabel("least loss over A, B and the second layer")
    axes.set_title(f"Assumption 1, W₀ = 0, d = {last['d']}, n = {last['n']}, σ = {last['sigma']:g}", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_gaps(axes: Any, curves: Sequence[Mapping[str, Any]], grid: Sequence[Mapping[str, Any]]) -> None:
    palette = ["#1b5e8c", "#a8480f", "#3c7d3c", "#7a4fa3", "#3c7d3c"]
    colors = {}
    for index, curve in enumerate(curves):
        key = (curve["d"], curve["sigma"])
        colors[key] = color = palette[index % len(palette)]
        dash = "--" if curve["d"] in [other["d"] for other in curves[:index]] else "-"
        heights = [gap / curve["d"] ** 2 for gap in curve["gap"]]
        axes.plot(curve["n"], heights, dash, color=color, label=f"d = {curve['d']}, σ = {curve['sigma']:g}")
    for entry in grid:
        color = colors.get((entry["d"], entry["sigma"]), "#555555")
        size = entry["d"] ** 2
        at, reach = entry["sampled_gap"] / size, entry["sampled_half_width"] / size
        axes.errorbar([entry["n"]], [at], [reach], fmt="o", color=color, markersize=4, capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("n, examples")
    axes.set_ylabel("gap / d²")
    axes.set_title("Gap c at W₀ = 0: exact, and sampled with 95 % interval", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _draw_priors(axes: Any, priors: Sequence[Mapping[str, Any]], turned: Sequence[Mapping[str, Any]]) -> None:
    d = priors[0]["d"]
    best = [entry for entry in priors if entry["d"] == d]
    fixed = [entry for entry in turned if entry["d"] == d and "gap" in entry]
    axes.axhline(0, color="black", linewidth=1)
    axes.plot([e["prior"] for e in best], [e["gap"] for e in best], "o-", color="#3c7d3c", label="best A and B of each")
    axes.plot([e["prior"] for e in fixed], [e["gap"] for e in fixed], "s-", color="#7a4fa3", label="both at A = −I/w")
    axes.axvspan(fixed[0]["smallest_prior"], max(e["prior"] for e in best), color="black", alpha=0.06, linewidth=0)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([-20, -10, -5, -2, -1, 0, 1, 2], ["−20", "−10", "−5", "−2", "−1", "0", "1", "2"])
    axes.minorticks_off()
    axes.set_xlabel("w, with W₀ = w I; shaded: the theorem's hypothesis")
    axes.set_ylabel("attention − first value")
    axes.set_title(f"W₀ ≠ 0: d = {d}, n = {best[0]['n']}, σ = {best[0]['sigma']:g}, optimised", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_training(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    labels = []
    for index, entry in enumerate(entries):
        reads = "positions" if entry["reads_positions"] else "tokens"
        labels.append(f"{reads}\n{entry['d']}, {entry['n']}\n{entry['sigma']:g}, {entry['prior']:g}")
        for key, shift in (("attention", -0.16), ("first_value", 0.16)):
            heights = [loss / entry["zero_loss"] for loss in entry[key]]
            marker, color = "o" if key == "attention" else "s", _COLORS[key]
            name = _LABELS[key] if index == 0 else None
            axes.plot([index + shift] * len(heights), heights, marker, color=color, alpha=0.6, markersize=4, label=name)
        for at, key in (("assumption_infimum", "attention"), ("first_value_minimum", "first_value")):
            if entry[at] is not None and entry["reads_positions"]:
                name = f"{_LABELS[key]}, best under Assumption 1" if index == 0 else None
                height = entry[at] / entry["zero_loss"]
                axes.plot([index - 0.36, index + 0.36], [height] * 2, color=_COLORS[key], linewidth=1.2, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    axes.minorticks_off()
    axes.set_xticks(range(len(labels)), labels, fontsize=7.5)
    axes.set_xlabel("first layer reads; d, n; σ, w", fontsize=9)
    axes.set_ylabel("loss / loss of predicting zero")
    axes.set_title("Trained freely: every seed", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
