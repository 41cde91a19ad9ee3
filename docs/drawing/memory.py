"""Memory and speed."""

from collections.abc import Callable
from itertools import product

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, PercentFormatter

import leanqkv
from leanqkv.report.frontier import Point, read_points

from .svg import BLUE, GREEN, GREY, INK, ORANGE, plot, read


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
    """Loss against the share of the cache."""
    return _frontier("cache against loss", "share of the source's cache in 16 bits", lambda point: point.share)


def frontier_speed() -> str:
    """Loss against the speed with that cache."""
    measured = "share of the source's speed, one text after 4,096 tokens"
    return _frontier("speed against loss", measured, lambda point: point.ratios["4096"])


def _frontier(title: str, measured: str, measure: Callable[[Point], float]) -> str:
    """Loss against what is measured, a line for each kind of reduction and precision; the best kinds alone."""
    points = read_points(read("frontier/smollm2/frontier.json"))
    kinds = {"source": (GREY, "o"), "latents": (BLUE, "s"), "separate-latents": (ORANGE, "^")}
    kinds["unrotated-latents"] = (GREEN, "D")
    precisions = {"16 bits": ("-", "full"), "8/4 bits": ("--", "left"), "4 bits": (":", "none")}

    def draw(axes: Axes) -> None:
        for (kind, (color, marker)), (precision, (line, fill)) in product(kinds.items(), precisions.items()):
            shown = [one for one in points if one.label.startswith(kind) and one.label.endswith(f", {precision}")]
            shown.sort(key=lambda one: one.share)
            across, losses = [100 * measure(one) for one in shown], [one.loss for one in shown]
            look = {"color": color, "marker": marker, "fillstyle": fill, "markerfacecoloralt": "white"}
            axes.plot(across, losses, linestyle=line, label=f"{kind}, {precision}", **look)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.01, 0.03, 0.1, 0.3, 1]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_xlabel(measured)
        axes.set_ylabel("nats above the source's loss")
        axes.set_title(f"SmolLM2-135M: {title}", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=3, columnspacing=1, fontsize=11)

    return plot(f"Loss above the source's against the {measured}, by reduction and precision.", 480, draw)


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
