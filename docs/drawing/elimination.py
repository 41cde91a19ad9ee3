"""Exact eliminations."""

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

import leanqkv
from leanqkv.eliminate.block_diagonal import saved

from .svg import BLUE, GREEN, GREY, ORANGE, plot, read

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
