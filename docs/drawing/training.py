"""Comparisons of trained models."""

import re
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import PairedDifference, over_seeds, paired_difference

from .svg import BLUE, GREEN, GREY, INK, ORANGE, RESULTS, Record, plot, read


def differences(directory: str, title: str, unit: str) -> str:
    """The difference of every model to its baseline, with the 95% interval over seeds."""
    results = [result for result in load_comparison(RESULTS / directory).results if result.difference]

    def draw(axes: Axes) -> None:
        for row, result in enumerate(results):
            difference = result.difference
            assert difference is not None and difference.half_width is not None and result.baseline is not None
            color = BLUE if difference.clear else GREY
            axes.errorbar(difference.mean, row, xerr=difference.half_width, fmt="o", color=color, capsize=5)
        axes.axvline(0, color=INK, linewidth=1.2)
        axes.set_yticks(range(len(results)), [label(result) for result in results])
        axes.set_ylim(len(results) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(signed))
        axes.set_xlabel(unit)
        axes.set_title(title, loc="left")

    def label(result: Any) -> str:
        extra = result.name.removeprefix(result.baseline.name)
        if extra == result.name:  # the baseline has a note of its own behind its name
            extra = result.name.removeprefix(result.baseline.name.partition(" ")[0])
        name = extra.lstrip("+:").replace("intermediate_size", "MLP").replace("hidden_size", "width")
        if len({re.split("[+ ]", one.name)[0] for one in results}) > 1:  # sizes, each with a baseline of its own
            name = result.name
        cache = result.kv_bytes / result.baseline.kv_bytes if result.kv_bytes else 1
        return name + (f"\n{cache:.0%} of the cache" if cache < 1 else "")

    rows = sum(1.5 if "\n" in label(result) else 1 for result in results)
    description = f"{title}: difference to the baseline with its 95% interval; blue where the interval leaves out zero."
    return plot(description, 130 + 34 * rows, draw)


def recipes(directory: str, title: str, most: float) -> str:
    """The last loss of every model under every recipe, and its range over seeds. Groups differ in the recipe alone.

    most: losses above it, and runs that stopped, are a cross on the edge.
    """
    results = load_comparison(RESULTS / directory).results
    kinds = list(dict.fromkeys(result.name.partition(", ")[0] for result in results))
    names = list(dict.fromkeys(result.name.partition(", ")[2] for result in results))
    looks = dict(zip(kinds, zip((GREY, ORANGE, BLUE), "os^", strict=True), strict=True))

    def draw(axes: Axes) -> None:
        for kind, (color, marker) in looks.items():
            axes.plot([], [], color=color, marker=marker, linestyle="", label=kind)
        for result in results:
            kind, _, name = result.name.partition(", ")
            color, marker = looks[kind]
            loss = result.mean_loss if result.losses else most
            row = names.index(name) + 0.2 * (kinds.index(kind) - 1)
            ends = [min(each, most) for each in (*result.losses.values(), loss)]
            axes.hlines(row, min(ends), max(ends), color=color)
            axes.plot(min(loss, most), row, "X" if loss >= most else marker, color=color, clip_on=False)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(right=most)
        axes.set_xlabel("validation loss at the end, nats")
        axes.set_title(title, loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.12), ncols=1)

    return plot(f"{title}: the last loss of every model under every recipe.", 210 + 40 * len(names), draw)


def rates_and_decays(directory: str, title: str) -> str:
    """The last loss over peak learning rates, a mark for every weight decay, and lines for models of the base's recipe.

    Recipes are behind names: MODEL, PEAK to LEAST, decay DECAY.
    """
    results = {result.name: result for result in load_comparison(RESULTS / directory).results}
    found = [(re.search(r", (\S+) to \S+, decay (\S+)$", name), result) for name, result in results.items()]
    points = [(match[2], float(match[1]), result.mean_loss) for match, result in found if match]
    decays = sorted({decay for decay, _, _ in points}, key=float, reverse=True)
    looks = dict(zip(decays, zip((GREY, ORANGE, BLUE, GREEN, INK), "os^Dv", strict=True), strict=True))
    fixed = {name: result.mean_loss for name, result in results.items() if "," not in name and " " not in name}
    baseline, widest = next(iter(fixed)), min(fixed, key=fixed.__getitem__)

    def draw(axes: Axes) -> None:
        for decay, (color, marker) in looks.items():
            own = sorted((rate, loss) for of, rate, loss in points if of == decay)
            axes.plot(*zip(*own, strict=True), color=color, marker=marker, linestyle="", label=f"weight decay {decay}")
        for name, style in ((baseline, "-"), (widest, "--")):
            axes.axhline(fixed[name], color=INK, linewidth=1.2, linestyle=style, label=name)
        axes.set_xlabel("highest learning rate")
        axes.set_ylabel("validation loss, nats")
        axes.set_title(title, loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=12)

    return plot(f"{title}: the last loss over learning rates and weight decays.", 460, draw)


def by_length(lines: Mapping[str, tuple[str, str]]) -> str:
    """Differences to the baseline in trainings of several lengths, with the 95% interval over seeds.

    lines: what a line is called -> the file of a record of benchmarks/by_scale.py along the tokens, the model in it.
    """
    records = {label: read(file)["scales"] for label, (file, _) in lines.items()}
    lengths = [scale["tokens"] / scale["parameters"] for scale in next(iter(records.values()))]

    def draw(axes: Axes) -> None:
        looks = list(zip((BLUE, ORANGE, GREEN), "os^", strict=True))[: len(lines)]
        for number, ((label, (_, name)), (color, marker)) in enumerate(zip(lines.items(), looks, strict=True)):
            found = [over_seeds(scale["differences"][name]) for scale in records[label]]
            beside = [length * 1.04 ** (number - 1) for length in lengths]
            means, widths = [at.mean for at in found], [at.half_width or 0 for at in found]
            axes.errorbar(beside, means, yerr=widths, color=color, marker=marker, capsize=4, label=label)
        axes.axhline(0, color=INK, linewidth=1.2)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.2g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(signed))
        axes.set_xlabel("training tokens per parameter")
        axes.set_ylabel("difference to the baseline, nats")
        axes.set_title("Trainings of several lengths", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=1)

    return plot("Difference to the baseline by the length of training, with 95% intervals over seeds.", 510, draw)


def copied(mechanism: str, files: Mapping[str, str]) -> str:
    """Differences to the baseline in tokens that can be copied from the context and in others, with 95% intervals.

    files: of records of benchmarks/copying.py, each with the name of its setting.
    """
    kinds = {"copied": (BLUE, "s", "can be copied"), "other": (GREY, "o", "others")}
    rows: list[tuple[str, dict[str, PairedDifference | None]]] = []
    for file, setting in files.items():
        record = read(file)

        def losses(model: str, kind: str, record: Record = record) -> dict[int, float]:
            return {row["seed"]: row["loss"][kind] for row in record["rows"] if row["model"] == model}

        baseline = record["baseline"]
        name = f"{baseline}+{mechanism}"
        rows.append((setting, {kind: paired_difference(losses(name, kind), losses(baseline, kind)) for kind in kinds}))

    def draw(axes: Axes) -> None:
        for row, (_, found) in enumerate(rows):
            for shift, (kind, (color, marker, label)) in zip((-0.12, 0.12), kinds.items(), strict=True):
                at = found[kind]
                assert at is not None
                style = {"fmt": marker, "color": color, "capsize": 5, "label": None if row else label}
                axes.errorbar(at.mean, row + shift, xerr=at.half_width or 0, **style)
        axes.axvline(0, color=INK, linewidth=1.2)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(signed))
        axes.set_xlabel("difference in validation loss, nats")
        axes.set_title(f"{mechanism}, by kind of token", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.64 / len(rows)), ncols=2)

    return plot("Difference to the baseline in tokens that can be copied and in others.", 150 + 55 * len(rows), draw)


def signed(value: float, _: Any = None) -> str:
    """A tick with its sign."""
    return f"{value:+g}".replace("-", "−") if value else "0"
