"""Conversion and uptraining."""

import statistics

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, PercentFormatter

from .svg import BLUE, GREEN, GREY, INK, ORANGE, Record, plot, read


def _losses_by_seed(record: Record) -> dict[int, float]:
    return {int(seed): loss for seed, loss in record["baseline"]["loss"].items()}


def conversion_methods() -> str:
    """What each conversion loses before any training, mean over seeds, on both corpora."""

    def lost(record: Record, method: str) -> float:
        base = _losses_by_seed(record)
        rows = [row for row in record["conversions"] if row["name"] == method]
        return statistics.mean(row["loss"] - base[row["seed"]] for row in rows)

    corpora = {"Python, 3 seeds": read("conversion/stdlib.json"), "C++, 2 seeds": read("conversion/torch-headers.json")}
    methods = ("mean-v", "top-v", "mean-vo", "svd", "top-vo", "calibrated")

    def draw(axes: Axes) -> None:
        for place, (name, record) in enumerate(corpora.items()):
            values = [lost(record, method) for method in methods]
            rows = [row + 0.2 * (2 * place - 1) for row in range(len(methods))]
            axes.barh(rows, values, 0.38, left=1e-3, color=(BLUE, GREY)[place], label=name)
            for row, value in zip(rows, values, strict=True):
                axes.text(1.15 * value + 1e-3, row, f"{value:.3f}", va="center", fontsize=13)
        axes.set_xscale("log")
        axes.set_xlim(3e-3, 4)
        axes.set_yticks(range(len(methods)), methods)
        axes.invert_yaxis()
        axes.set_xlabel("nats lost against the source, log scale")
        axes.set_title("Loss right after conversion, 79% of the cache", loc="left")
        axes.legend(loc="lower right")

    return plot("Nats lost right after conversion, by method; the calibrated one loses about a hundredth.", 380, draw)


def uptraining() -> str:
    """P3's Figure 8: loss over the baseline's of the same seed, against the share of the pretraining tokens."""
    record = read("conversion/stdlib.json")
    base = _losses_by_seed(record)
    arms = {
        "calibrated": (BLUE, "o"),
        "calibrated, teacher": (GREEN, "s"),
        "mean-v": (ORANGE, "^"),
        "baseline": (GREY, "D"),
    }

    def draw(axes: Axes) -> None:
        for arm, (color, marker) in arms.items():
            points: dict[float, list[float]] = {}
            for row in record["uptraining"]:
                if row["arm"] == arm:
                    points.setdefault(row["share"], []).append(row["loss"] - base[row["seed"]])
            means = [statistics.mean(values) for values in points.values()]
            name = "the source, trained on" if arm == "baseline" else arm
            axes.plot(list(points), means, color=color, marker=marker, label=name)
            axes.fill_between(
                list(points), *([f(v) for v in points.values()] for f in (min, max)), color=color, alpha=0.15
            )
        axes.axhline(0, color=INK, linewidth=1.2)
        axes.set_yscale("symlog", linthresh=0.01, linscale=1.5)
        axes.yaxis.set_major_locator(FixedLocator([-0.01, -0.005, 0, 0.005, 0.01, 0.1, 1]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}".replace("-", "−") if y else "0"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlim(0, 0.085)
        axes.set_ylim(-0.007, 1)
        axes.set_xlabel("share of the pretraining tokens, calibration included")
        axes.set_ylabel("nats above the source")
        axes.set_title("Training on after conversion", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)

    return plot("Loss above the source's against uptraining tokens; mean and range of three seeds.", 460, draw)
