"""Inside trained models."""

import statistics

from matplotlib.axes import Axes

from .svg import BLUE, GREY, plot, read


def probes() -> str:
    """Loss of the linear probe of every layer: mean and range over seeds."""
    models = read("analysis/probes/analysis.json")["models"].values()
    looks = {"small": (GREY, "o"), "small+skipv1": (BLUE, "s")}

    def draw(axes: Axes) -> None:
        for name, (color, marker) in looks.items():
            layers = list(zip(*(model["probe"]["losses"] for model in models if model["name"] == name), strict=True))
            axes.plot([statistics.mean(values) for values in layers], color=color, marker=marker, label=name)
            axes.fill_between(
                range(len(layers)), *([f(v) for v in layers] for f in (min, max)), color=color, alpha=0.15
            )
        axes.set_xlabel("layer, counted from 0")
        axes.set_ylabel("loss of the probe, nats")
        axes.set_title("Next token read off each layer", loc="left")
        axes.legend()

    return plot("Probe loss by layer: SkipV1's is higher in the first layers and lower in the last.", 350, draw)


def head_scores() -> str:
    """The highest score of each kind, a mark for every seed."""
    models = read("analysis/analysis.json")["models"].values()
    scores = {"previous_token": "previous token", "induction": "induction", "matching": "matching, on text"}
    looks = {"small": (GREY, "o", -0.12), "small+skipv1": (BLUE, "s", 0.12)}

    def draw(axes: Axes) -> None:
        for name, (color, marker, shift) in looks.items():
            for row, score in enumerate(scores):
                highest = [max(max(layer) for layer in m["heads"][score]) for m in models if m["name"] == name]
                mark = {"color": color, "marker": marker, "linestyle": "none"}
                axes.plot(highest, [row + shift] * len(highest), **mark, label=name if row == 0 else None)
        axes.set_yticks(range(len(scores)), list(scores.values()))
        axes.set_ylim(len(scores) - 0.5, -0.5)
        axes.set_xlim(0, 0.55)
        axes.set_xlabel("highest score of any head, one mark a seed")
        axes.set_title("Copying heads are stronger with SkipV1", loc="left")
        axes.legend(loc="upper right")

    return plot("Highest previous-token, induction and matching scores of three seeds each.", 300, draw)
