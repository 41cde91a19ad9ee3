"""Draw the documentation's figures from the records under `results/` and from the plan, into `docs/figures/`.

    python docs/make_figures.py
    python docs/make_figures.py --only uptraining

Every figure is an SVG that follows the reader's light or dark mode and stays legible at the width of a phone. Its
`<desc>` names the records that it was drawn from, with their hash, so that `tests/test_docs.py` can tell an old figure.
"""

import argparse
import hashlib
import io
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

import leanqkv
from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import PairedDifference, paired_difference
from leanqkv.compare.trend import FRACTIONS, trend
from leanqkv.eliminate.block_diagonal import saved
from leanqkv.report.frontier import read_points

ROOT = Path(__file__).parent.parent
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


@dataclass(frozen=True)
class Figure:
    """A figure: the records it is drawn from, relative to `results/`, and what draws it as SVG."""

    sources: tuple[str, ...]
    draw: Callable[[], str]


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


# What SkipV1 shares


def shared_values() -> str:
    """Layers from top to bottom, their key and value heads as boxes: cached ones filled, borrowed ones dashed."""
    config = leanqkv.preset("small", "skipv1")
    before, after = (leanqkv.kv_bytes_per_token(c) for c in (leanqkv.preset("small"), config))
    layers, heads = leanqkv.plan(config).layers, config.num_attention_heads
    top, row_height, pitch = 82, 34, 38
    starts = {"keys": 92, "values": 92 + heads * pitch + 22}
    right = starts["values"] + heads * pitch + 18
    own = f'fill="{BLUE}"'
    lent = f'fill="{ORANGE}"'
    borrowed = f'fill="none" stroke="{ORANGE}" stroke-width="2" stroke-dasharray="5 4"'
    parts: list[str] = []

    def text(x: float, y: float, words: str, color: str = INK, size: int = 17, bold: bool = False) -> None:
        weight = ' font-weight="600"' if bold else ""
        parts.append(f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{weight}>{words}</text>')

    def box(x: float, y: float, look: str) -> None:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{pitch - 8}" height="{row_height - 10}" rx="5" {look}/>')

    lending = {head for plan in layers for s in plan.borrowed for head in range(s.start, s.stop)}
    text(18, 32, f"SkipV1: layers 2–{len(layers)} read half of their value heads from layer 1", size=18, bold=True)
    for name, x in starts.items():
        text(x, top - 14, f"{heads} {name.removesuffix('s')} heads", GREY)
    for row, plan in enumerate(layers):
        y = top + row * row_height
        text(18, y + 18, f"layer {row + 1}")
        for name, x in starts.items():
            for source in getattr(plan.layout, name):
                for head in range(source.start, source.stop):
                    lends = row == 0 and name == "values" and head in lending
                    box(x + head * pitch, y, lent if lends else own if source.layer == row else borrowed)
    for row, (look, words) in enumerate(
        ((own, "cached"), (lent, "cached once for all"), (borrowed, "read from layer 1"))
    ):
        box(right, top + row * row_height, look)
        text(right + pitch, top + row * row_height + 18, words)
    text(right, top + 138, "KV cache per token:", GREY)
    text(right, top + 164, f"{before:,} → {after:,} bytes", size=18, bold=True)
    text(right, top + 190, f"−{1 - after / before:.0%} at {len(layers)} layers")
    description = (
        f"SkipV1Former at the size small: every layer caches its keys; layers 2 to {len(layers)} cache half of their "
        f"value heads and read the others from layer 1, so that a token takes {after:,} instead of {before:,} bytes."
    )
    return document(description, 680, top + len(layers) * row_height + 12, "\n".join(parts))


# Comparisons of trained models


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
        name = extra.lstrip("+").replace("intermediate_size", "MLP").replace("hidden_size", "width")
        cache = result.kv_bytes / result.baseline.kv_bytes if result.kv_bytes else 1
        return name + (f"\n{cache:.0%} of the cache" if cache < 1 else "")

    rows = sum(1.5 if "\n" in label(result) else 1 for result in results)
    description = f"{title}: difference to the baseline with its 95% interval; blue where the interval leaves out zero."
    return plot(description, 130 + 34 * rows, draw)


# A comparison -> how its lines are called, behind the mechanism.
TO_THE_END = {
    "tiny-4e-3": "1.07M, Python",
    "tiny-prose": "1.07M, prose",
    "half-tiny-4e-3": "0.56M, Python",
    "half-tiny-prose": "0.56M, prose",
}
COPIED = ("tiny-4e-3", "half-tiny-4e-3")


def gap_by_length(directories: Mapping[str, str]) -> str:
    """The difference of every model to its baseline at four lengths of training, with the 95% interval over seeds."""
    lines = []
    for directory, setting in directories.items():
        for result in load_comparison(RESULTS / directory).results:
            if result.baseline is not None:
                found = trend(result.curves(), result.baseline.curves())
                assert found is not None
                run = next(iter(result.baseline.finals.values()))
                name = result.name.removeprefix(result.baseline.name).lstrip("+").replace("intermediate_size", "MLP")
                lines.append((f"{name}, {setting}", run.tokens / run.parameters["total"], found.differences))

    def draw(axes: Axes) -> None:
        looks = zip((BLUE, ORANGE, GREEN, INK, GREY), "os^vD", strict=True)
        for number, ((name, whole, differences), (color, marker)) in enumerate(zip(lines, looks, strict=False)):
            lengths = [whole * fraction * 1.04 ** (number - 1.5) for fraction in FRACTIONS]  # beside each other
            means, widths = zip(*((at.mean, at.half_width or 0) for at in differences), strict=True)
            axes.errorbar(lengths, means, yerr=widths, color=color, marker=marker, capsize=4, label=name)
        axes.axhline(0, color=INK, linewidth=1.2)
        middle = [at.mean for _, _, differences in lines for at in differences]
        axes.set_ylim(min(0, *middle) - 0.1, max(0, *middle) + 0.1)  # wide intervals of early steps are cut off
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([20 * fraction for fraction in FRACTIONS]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(signed))
        axes.set_xlabel("training tokens per parameter")
        axes.set_ylabel("difference to the baseline, nats")
        axes.set_title("What is left of a gain as training goes on", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=1)

    description = "Difference to the baseline against training tokens per parameter, with 95% intervals over seeds."
    return plot(description, 430 + 24 * len(lines), draw)


def copied(files: Mapping[str, str], title: str) -> str:
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
        for name in dict.fromkeys(row["model"] for row in record["rows"] if row["model"] != baseline):
            found = {kind: paired_difference(losses(name, kind), losses(baseline, kind)) for kind in kinds}
            rows.append((f"{name.removeprefix(baseline).lstrip('+')}\n{setting}", found))

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
        axes.set_title(title, loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.64 / len(rows)), ncols=2)

    return plot(f"{title}: difference to the baseline by kind of token.", 150 + 65 * len(rows), draw)


def signed(value: float, _: Any = None) -> str:
    """A tick with its sign."""
    return f"{value:+g}".replace("-", "−") if value else "0"


# Conversion and uptraining


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


# Exact eliminations

_LLAMA = {
    "position_embedding_type": "rope",
    "norm_type": "rmsnorm",
    "mlp_type": "gated",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
# Shapes of published models with norms.
SHAPES = {
    "Mistral-7B": _LLAMA | {"num_key_value_heads": 8, "intermediate_size": 14336},
    "Llama-2-7B": _LLAMA | {"num_key_value_heads": 32, "intermediate_size": 11008},
}


def redundant_shares() -> dict[str, float]:
    """Model -> share of its parameters that identity blocks make redundant, from its shape alone."""
    configs = {name: leanqkv.LeanConfig(**shape) for name, shape in SHAPES.items()}
    configs["GPT-2 124M"] = leanqkv.preset("gpt2-124m")
    return {name: saved(config) / leanqkv.count_parameters(config).total for name, config in configs.items()}


def redundant_weights() -> str:
    """What can be removed exactly: from models with norms, and from models without norms and skips."""
    record = read("exact/gpt2-small.json")
    rows = [(f"{name}\nas published", share, BLUE) for name, share in redundant_shares().items()]
    names = ("GPT-2 shape, no norms,\nattention skip only: Q", "GPT-2 shape, skipless:\nQ and P")
    for name, speed in zip(names, record["speed"], strict=True):
        before, after = speed["parameters"]
        rows.append((name, 1 - after / before, GREY))
    rows.append(("Mistral-7B shape,\nskipless: Q and P", record["weight_table"]["Mistral-7B"]["weight savings"], GREY))

    def draw(axes: Axes) -> None:
        axes.barh(range(len(rows)), [100 * share for _, share, _ in rows], 0.6, color=[color for *_, color in rows])
        for row, (_, share, _) in enumerate(rows):
            axes.text(100 * share + 0.2, row, f"{100 * share:.{2 if share < 0.01 else 1}f}%", va="center")
        axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 17.5)
        axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_xlabel("share of the weights that can be removed exactly")
        axes.set_title("With norms, under 1%", loc="left")

    return plot("Share of weights removed exactly: under 1% with norms, 6 to 15% in models without.", 400, draw)


def elimination_precision() -> str:
    """How far the logits move after an elimination, by the precision of weights and arithmetic."""
    cases = read("exact/gpt2-small.json")["cases"]
    looks = {"fp64": (GREEN, "o"), "fp32": (BLUE, "s"), "bf16": (ORANGE, "^")}

    def draw(axes: Axes) -> None:
        for dtype, (color, marker) in looks.items():
            errors = [case["quiet"]["distance"][dtype]["result"]["relative"] for case in cases]
            axes.plot(errors, range(len(cases)), linestyle="none", color=color, marker=marker, label=dtype)
        own = [case["plain"]["distance"]["bf16"]["original"]["relative"] for case in cases]
        axes.plot(
            own, range(len(cases)), linestyle="none", color=GREY, marker="|", markersize=14, label="bf16, original"
        )
        axes.set_xscale("log")
        axes.set_yticks(range(len(cases)), [case["name"].partition(" (")[0].replace(", ", ",\n") for case in cases])
        axes.invert_yaxis()
        axes.set_xlabel("largest logit difference / largest logit")
        axes.set_title("Error of the logits after elimination", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.2, -0.16), ncols=4, columnspacing=1)

    return plot("Relative error of logits after seven eliminations, in fp64, fp32 and bf16.", 470, draw)


# Memory and speed


def cache_sizes() -> str:
    """KV cache per token of GPT-2 124M under every mechanism that shares or shrinks it, from the plan."""
    names = ("", "skipv1", "skipkv1", "yoco-v", "cla-v", "fusedkv-lite", "skipv1-yoco", "yoco", "cla", "keys-as-values")
    names += ("gqa", "skipv1+gqa", "mla", "skipv1+mla", "mqa")
    full = leanqkv.kv_bytes_per_token(leanqkv.preset("gpt2-124m"))
    sizes = {
        name or "baseline": leanqkv.kv_bytes_per_token(leanqkv.preset("gpt2-124m", *filter(None, name.split("+"))))
        for name in names
    }
    rows = sorted(sizes.items(), key=lambda item: -item[1])

    def draw(axes: Axes) -> None:
        axes.barh([name for name, _ in rows], [size / 1024 for _, size in rows], 0.65, color=BLUE)
        for row, (_, size) in enumerate(rows):
            axes.text(size / 1024 + 0.4, row, f"{size:,} ({size / full:.0%})", va="center", fontsize=13)
        axes.invert_yaxis()
        axes.set_xlim(0, 46)
        axes.set_xlabel("KiB per token, bfloat16")
        axes.set_title("KV cache of GPT-2 124M by mechanism", loc="left")

    return plot("KV cache bytes per token of GPT-2 124M, by mechanism, from the plan.", 480, draw)


def published_bytes() -> str:
    """P3's Table 2 beside the bytes of a real cache."""
    rows = read("kv-bytes.json")["rows"]

    def draw(axes: Axes) -> None:
        for place, (key, color, name) in enumerate(
            (("published", GREY, "P3 Table 2"), ("measured", BLUE, "measured here"))
        ):
            at = [row + 0.2 * (2 * place - 1) for row in range(len(rows))]
            axes.barh(at, [row[key] / 1024 for row in rows], 0.38, color=color, label=name)
            for y, row in zip(at, rows, strict=True):
                axes.text(row[key] / 1024 + 1, y, f"{row[key]:,.0f}", va="center", fontsize=13)
        axes.set_yticks(range(len(rows)), [row["model"].replace("-", "-\n") for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 118)
        axes.set_xlabel("KiB per token")
        axes.set_title("KV cache per token at the paper's size", loc="left")
        axes.legend(loc="lower right")

    return plot("KV bytes per token: P3's Table 2 and measured; they differ for SkipV1-MLA alone.", 350, draw)


def sequences_at_once() -> str:
    """Sequences that decode at once in vLLM's pages, by mechanism."""
    rows = sorted(read("vllm/serving.json")["memory"]["rows"], key=lambda row: row["most_at_once"])

    def draw(axes: Axes) -> None:
        colors = [GREY if row["mechanism"] == "baseline" else BLUE for row in rows]
        axes.barh(range(len(rows)), [row["most_at_once"] for row in rows], 0.6, color=colors)
        for y, row in enumerate(rows):
            axes.text(row["most_at_once"] + 1, y, f"{row['most_at_once']}", va="center", fontsize=13)
        axes.set_yticks(range(len(rows)), [row["mechanism"].replace("+", "\n+") for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 92)
        axes.set_xlabel("sequences of 128 tokens at once in 64 MiB")
        axes.set_title("vLLM: more sequences in the same memory", loc="left")

    return plot("Sequences that vLLM decodes at once in 64 MiB of cache, by mechanism.", 420, draw)


def decoding() -> str:
    """Tokens per second of the decoder and of `generate`."""
    rows = read("decode/transformers.json")["rows"]
    models = {"GPT2LMHeadModel": "GPT-2", "LlamaForCausalLM": "LLaMA"}
    names = [f"{models[row['model']]}, {row['dtype']}, batch {row['batch']}" for row in rows]

    def draw(axes: Axes) -> None:
        for place, (key, color) in enumerate((("ours", BLUE), ("theirs", GREY))):
            at = [row + 0.2 * (2 * place - 1) for row in range(len(rows))]
            name = "leanqkv.inference.Decoder" if key == "ours" else "generate of transformers"
            axes.barh(at, [row[f"{key}_tokens_per_second"] for row in rows], 0.38, color=color, label=name)
        for at, row in enumerate(rows):
            axes.text(
                row["ours_tokens_per_second"] + 8, at - 0.2, f"× {row['ratio']['median']:.2f}", va="center", fontsize=13
            )
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 620)
        axes.set_xlabel("tokens per second, 2 CPU cores")
        axes.set_title("Decoding: 128 tokens of prompt, 256 new", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.15), ncols=2, columnspacing=1)

    return plot("Tokens per second of the decoder against generate of transformers.", 450, draw)


def cache_by_context() -> str:
    """Megabytes of cache against context, measured on the tensors, at the largest batch."""
    record = read("bench/gpt2-124m/bench.json")
    most = max(row["batch"] for row in record["rows"])
    looks = {"gpt2-124m": (GREY, "o"), "gpt2-124m+skipv1": (BLUE, "s")}

    def draw(axes: Axes) -> None:
        for name, (color, marker) in looks.items():
            rows = [row for row in record["rows"] if (row["model"], row["batch"]) == (name, most)]
            contexts, sizes = [row["context"] for row in rows], [row["cache"] / 1e6 for row in rows]
            axes.plot(contexts, sizes, color=color, marker=marker, label=name)
            axes.text(contexts[-1] + 20, sizes[-1], f"{sizes[-1]:.2f} MB", va="center")
        axes.set_xlim(0, 1150)
        axes.set_ylim(0, 600)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("KV cache, MB")
        axes.set_title(f"KV cache at batch {most}, bfloat16", loc="left")
        axes.legend(loc="upper left")

    return plot("KV cache in MB against context, GPT-2 124M with and without SkipV1.", 340, draw)


def frontier() -> str:
    """Loss against the share of the cache, a line for each kind of reduction and precision; the best kinds alone."""
    points = read_points(read("frontier/smollm2/frontier.json"))
    kinds = {"source": (GREY, "o"), "latents": (BLUE, "s"), "separate-latents": (ORANGE, "^")}
    precisions = {"16 bits": "-", "8/4 bits": "--", "4 bits": ":"}

    def draw(axes: Axes) -> None:
        for (kind, (color, marker)), (precision, line) in product(kinds.items(), precisions.items()):
            shown = [one for one in points if one.label.startswith(kind) and one.label.endswith(f", {precision}")]
            shown.sort(key=lambda one: one.share)
            shares, losses = [100 * one.share for one in shown], [one.loss for one in shown]
            label = f"{kind}, {precision}"
            axes.plot(shares, losses, color=color, marker=marker, linestyle=line, label=label)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.01, 0.03, 0.1, 0.3, 1]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_xlabel("share of the source's cache in 16 bits")
        axes.set_ylabel("nats above the source's loss")
        axes.set_title("SmolLM2-135M: cache against loss", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=3, columnspacing=1, fontsize=11)

    return plot("Loss above the source's against the share of its KV cache, by reduction and precision.", 480, draw)


# Inside trained models


def quantized_cache() -> str:
    """Bytes of cache per token by the precision that it is kept in, a line for each architecture."""
    rows = read("quantized-cache.json")["rows"]
    bits = list(rows[0]["bytes_per_token"])
    looks = zip((INK, BLUE, ORANGE), "os^", strict=True)
    styles = {name: (color, marker) for name, (color, marker) in zip(("MHA", "GQA", "MLA"), looks, strict=True)}

    def draw(axes: Axes) -> None:
        for row in rows:
            kind = next((name for name in ("GQA", "MLA") if name.lower() in row["name"]), "MHA")
            (color, marker), skips = styles[kind], "skipv1" in row["name"]
            label = f"{kind} with SkipV1" if skips else kind
            sizes = [row["bytes_per_token"][name] for name in bits]
            axes.plot(bits, sizes, color=color, marker=marker, linestyle="--" if skips else "-", label=label)
        axes.set_yscale("log")
        axes.set_xticks(range(len(bits)), [name.replace(" (", "\n(") for name in bits])
        axes.yaxis.set_major_locator(FixedLocator([500, 1000, 3000, 10_000, 30_000]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("bytes per token")
        axes.set_title("Both savings multiply", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=3, columnspacing=1)

    return plot("Bytes of KV cache per token of GPT-2 124M's shape, by architecture and precision.", 440, draw)


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


COMPARISONS = {
    "kv-sharing": ("Sharing values, 3 seeds", "difference in validation loss, nats"),
    "query": ("Queries, 3 seeds", "difference in validation loss, nats"),
    "quickstart": ("Quickstart, 2 seeds", "difference in validation loss, nats"),
    "vision": ("Images, 3 seeds", "difference in test accuracy"),
}


def _files(directory: str) -> tuple[str, ...]:
    """The records of a comparison."""
    runs = sorted(path.parent.name for path in (RESULTS / directory).glob("runs/*/record.json"))
    return (f"{directory}/compare.json", *(f"{directory}/runs/{run}/record.json" for run in runs))


def _comparison(directory: str, words: Sequence[str]) -> Figure:
    return Figure(_files(directory), lambda: differences(directory, *words))


_CONVERSION, _EXACT = ("conversion/stdlib.json", "conversion/torch-headers.json"), ("exact/gpt2-small.json",)
ALL: dict[str, Figure] = {
    "skipv1": Figure((), shared_values),
    "cache-sizes": Figure((), cache_sizes),
    "conversion-methods": Figure(_CONVERSION, conversion_methods),
    "uptraining": Figure(_CONVERSION[:1], uptraining),
    "redundant-weights": Figure(_EXACT, redundant_weights),
    "elimination-precision": Figure(_EXACT, elimination_precision),
    "published-bytes": Figure(("kv-bytes.json",), published_bytes),
    "sequences-at-once": Figure(("vllm/serving.json",), sequences_at_once),
    "decoding": Figure(("decode/transformers.json",), decoding),
    "cache-by-context": Figure(("bench/gpt2-124m/bench.json",), cache_by_context),
    "frontier": Figure(("frontier/smollm2/frontier.json",), frontier),
    "quantized-cache": Figure(("quantized-cache.json",), quantized_cache),
    "probes": Figure(("analysis/probes/analysis.json",), probes),
    "head-scores": Figure(("analysis/analysis.json",), head_scores),
    "gap-by-length": Figure(
        tuple(file for name in TO_THE_END for file in _files(name)), lambda: gap_by_length(TO_THE_END)
    ),
    "copied": Figure(
        tuple(f"{name}/copying.json" for name in COPIED),
        lambda: copied({f"{name}/copying.json": TO_THE_END[name] for name in COPIED}, "Gain by kind of token"),
    ),
    **{name: _comparison(name, words) for name, words in COMPARISONS.items()},
}


def signature(figure: Figure) -> str:
    """What a figure was drawn from: its records and the hash of their contents."""
    if not figure.sources:
        return "Drawn from the plan."
    digest = hashlib.sha256()
    for source in figure.sources:
        digest.update((RESULTS / source).read_bytes())
    shown = ", ".join(f"results/{source}" for source in figure.sources if "/runs/" not in source)
    return f"Drawn from {shown}; sha256 {digest.hexdigest()}."


def make(name: str) -> str:
    """One figure as SVG."""
    figure = ALL[name]
    return figure.draw().replace("</title>\n", f"</title>\n<desc>{signature(figure)}</desc>\n", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ALL, help="draw this figure alone")
    arguments = parser.parse_args()
    FIGURES.mkdir(exist_ok=True)
    for name in [arguments.only] if arguments.only else ALL:
        (FIGURES / f"{name}.svg").write_text(make(name))


if __name__ == "__main__":
    main()
