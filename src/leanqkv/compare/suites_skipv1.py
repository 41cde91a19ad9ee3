"""The tables and figures of P3, Wu et al. 2025, "Improving Model Representation and Reducing KV Cache via Skip
Connections with First Value Heads" (SkipV1Former), as suites.

At `paper` the recipes are those of the presets, Tables 3 and 4. At `tiny` and `small` the GPT-2 tables run on the bases
of that name, and the LLaMA tables on LLaMA shapes divided as their labels say. P3 chooses one learning rate for all
models, the best of the baseline; so does every suite here.
"""

from collections.abc import Mapping
from typing import Any

from ..presets import BASES
from .suite import PAPER, SMALL, TINY, Entry, Group, Published, Setup, Suite

LOSS = "validation loss"
OPENWEBTEXT2, C4 = "Geralt-Targaryen/openwebtext2", "allenai/c4:en"
GPT2_TOKENIZER = "openai-community/gpt2"

GPT_PAPER_NOTE = (
    "At paper: OpenWebText2 is read from a copy on the Hugging Face hub, the GPT-2 tokenizer and the validation every "
    "500 steps on 1,024 sequences are ours; the paper names none of them."
)
LLAMA_PAPER_NOTE = (
    "The paper does not name the tokenizer for C4: a byte-level BPE of 32,000 trained on the data is ours, and so is "
    "the validation every 500 steps on 1,024 sequences."
)
GPT_NOTE = (
    "Shape, data and recipe are ours; all models share the learning rate that is best for the baseline at tiny, and "
    "that was not searched at small."
)
LLAMA_NOTE = (
    "The shapes are the paper's divided by the number behind the slash in width and by smaller ones in heads and "
    "layers; data, vocabulary, batch and steps are ours. The learning rate is the paper's of 60M to 350M, 2e-3, for "
    "all; it was also the best of 1e-3, 2e-3, 4e-3 and 8e-3 for llama-350m/8 on one seed, and was not searched at "
    "small."
)


def _rows(base: str, mechanisms: Mapping[str, str], recipe: Mapping[str, Any], label: str = "") -> Group:
    """One entry per row: `base` with the row's mechanisms, which go into the label too."""
    return tuple(
        Entry(f"{base}{mechanism}", f"{label or base}{mechanism}", recipe, row) for row, mechanism in mechanisms.items()
    )


def _gpt(mechanisms: Mapping[str, str], sizes: tuple[str, ...], layers: int | None = None) -> dict[str, Setup]:
    """A GPT-2 suite at every scale. `layers`: that many at tiny, where the mechanisms need more than its four."""
    setups = {}
    for scale in (TINY, SMALL):
        name = f"{scale}+num_hidden_layers={layers}" if layers and scale == TINY else scale
        recipe = {"learning_rate": BASES[scale].recipe.learning_rate}
        setups[scale] = Setup((_rows(name, mechanisms, recipe),), notes=(GPT_NOTE,))
    groups = tuple(_rows(f"gpt2-{size}", mechanisms, {}) for size in sizes)
    setups[PAPER] = Setup(groups, 1, OPENWEBTEXT2, GPT2_TOKENIZER, 1024, 500, (GPT_PAPER_NOTE,))
    return setups


# What the shapes of LLaMA are divided by: width, heads, layers. TinyLLaMA keeps its heads, of which four share a value.
DIVISORS = {
    TINY: {"llama-1b": (16, 4, 4), "llama": (8, 2, 4), "tinyllama": (8, 1, 4)},
    SMALL: {"llama-1b": (8, 4, 2), "llama": (4, 2, 2), "tinyllama": (4, 1, 2)},
}
LLAMA_RECIPES: dict[str, dict[str, Any]] = {
    TINY: {"steps": 800, "batch_size": 8, "learning_rate": 2e-3},
    SMALL: {"steps": 600, "batch_size": 16, "learning_rate": 2e-3},
}


def _divided(base: str, scale: str) -> tuple[str, str]:
    """The name of a LLaMA base divided for a scale, and its label, `llama-350m/8`."""
    divisors = DIVISORS[scale]
    width, heads, layers = divisors.get(base) or divisors[base.partition("-")[0]]
    config, ours = BASES[base].config, BASES[scale].config
    fields = {
        "hidden_size": config["hidden_size"] // width,
        "intermediate_size": round(config["intermediate_size"] / width),
        "num_attention_heads": config["num_attention_heads"] // heads,
        "num_hidden_layers": round(config["num_hidden_layers"] / layers),
        "vocab_size": ours["vocab_size"],
        "max_position_embeddings": ours["max_position_embeddings"],
    }
    return "+".join([base, *(f"{name}={value}" for name, value in fields.items())]), f"{base}/{width}"


def _llama(base: str, scale: str, mechanisms: Mapping[str, str], recipe: Mapping[str, Any] | None = None) -> Group:
    if scale == PAPER:
        return _rows(base, mechanisms, recipe or {})
    name, label = _divided(base, scale)
    return _rows(name, mechanisms, {**LLAMA_RECIPES[scale], **(recipe or {})}, label)


def _llama_setups(base: str, mechanisms: Mapping[str, str]) -> dict[str, Setup]:
    """A suite on one LLaMA size, at every scale."""
    ours = {scale: Setup((_llama(base, scale, mechanisms),), notes=(LLAMA_NOTE,)) for scale in (TINY, SMALL)}
    return ours | {PAPER: Setup((_llama(base, PAPER, mechanisms),), 1, C4, None, 1024, 500, (LLAMA_PAPER_NOTE,))}


def _sizes(names: Mapping[str, str], scale: str, steps: bool) -> tuple[Group, ...]:
    """Pairs of a baseline and SkipV1 by size. `steps`: at tiny and small as long as the paper's in proportion."""
    return tuple(
        _llama(
            base,
            scale,
            {size: "", f"{size} skipv1": "+skipv1"},
            {"steps": BASES[base].recipe.steps * 2 // 25} if steps and scale != PAPER else None,
        )
        for size, base in names.items()
    )


def _pairs(baseline: Mapping[str, str], skipv1: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    """Published numbers of two models by size."""
    return tuple({size: baseline[size], f"{size} skipv1": skipv1[size]} for size in baseline)


KV_SHARING = Suite(
    "Sharing values between layers: SkipV1 against ResFormer, DenseFormer, YOCO-V and CLA-V",
    _gpt(
        {
            "baseline": "",
            "skipv1": "+skipv1",
            "resformer": "+resformer",
            "denseformer": "+denseformer",
            "yoco-v": "+yoco-v",
            "cla-v": "+cla-v",
        },
        ("125m", "200m", "355m", "550m"),
    ),
    "P3 Figure 4",
    (
        Published(
            "P3 Figure 4",
            "GPT-2 of 125M, 200M, 355M and 550M, OpenWebText2, 40k steps",
            LOSS,
            (
                {
                    "baseline": "above SkipV1",
                    "skipv1": "lowest, as ResFormer",
                    "resformer": "lowest, as SkipV1",
                    "denseformer": "above SkipV1",
                    "yoco-v": "clearly above SkipV1",
                    "cla-v": "clearly above SkipV1",
                },
            ),
        ),
    ),
)

RATIOS = {
    "0": "",
    "1/4": "+skipv1:ratio=0.25",
    "1/2": "+skipv1",
    "3/4": "+skipv1:ratio=0.75",
    "1": "+skipv1:ratio=1.0",
}
FIGURE_9A = Published(
    "P3 Figure 9(a)",
    "GPT-2 355M, OpenWebText2, 40k steps",
    LOSS,
    (
        {
            "0": "baseline",
            "1/4": "above 1/2",
            "1/2": "lowest",
            "3/4": "above 1/2",
            "1": "clearly worse (Appendix B.2, as SVFormer)",
        },
    ),
)
SKIP_RATIO = Suite(
    "How many value heads are the first layer's: LLaMA-1B",
    _llama_setups("llama-1b", RATIOS),
    "P3 Table 7",
    (
        Published(
            "P3 Table 7",
            "LLaMA-1B, C4, 25k steps",
            LOSS,
            ({"0": "2.723", "1/4": "2.716", "1/2": "2.711", "3/4": "2.717"},),
        ),
        FIGURE_9A,
    ),
    ("P3 Table 7 has no row for a ratio of 1, SVFormer; Appendix B.2 says that it is clearly worse.",),
)
SKIP_RATIO_GPT2 = Suite(
    "How many value heads are the first layer's: GPT-2 355M", _gpt(RATIOS, ("355m",)), "P3 Figure 9(a)", (FIGURE_9A,)
)

SKIP_LAYER = Suite(
    "Which layer's values are reused",
    _gpt(
        {"baseline": ""} | {f"skipv{layer}": f"+skipv{layer}" for layer in range(5)},
        ("355m",),
        layers=6,
    ),
    "P3 Figure 9(b)",
    (
        Published(
            "P3 Figure 9(b)",
            "GPT-2 355M (the figure names no size; that of Figure 9(a)), OpenWebText2, 40k steps",
            LOSS,
            (
                {
                    "baseline": "baseline",
                    "skipv0": "severely worse than the baseline",
                    "skipv1": "lowest",
                    "skipv2": "marginally below the baseline",
                    "skipv3": "above SkipV1",
                    "skipv4": "above SkipV1",
                },
            ),
        ),
    ),
)

INJECTION = Suite(
    "Which heads of the first layer are injected, and where",
    _llama_setups(
        "llama-350m",
        {
            "skipv1": "+skipv1",
            "pooling": "+skipv1:injection=pooling",
            "dynamic": "+skipv1:injection=dynamic",
            "odd/even": "+skipv1:injection=odd_even",
            "skipv1 + resformer": "+skipv1:injection=resformer",
        },
    ),
    "P3 Table 13",
    (
        Published(
            "P3 Table 13",
            "LLaMA-350M, C4, 15k steps",
            LOSS,
            (
                {
                    "skipv1": "2.885",
                    "pooling": "2.881",
                    "dynamic": "2.885",
                    "odd/even": "2.883",
                    "skipv1 + resformer": "2.889",
                },
            ),
        ),
    ),
)

KV_BOTH = Suite(
    "Sharing keys as well as values",
    _gpt(
        {
            "baseline": "",
            "skipv1": "+skipv1",
            "skipkv1": "+skipkv1",
            "skipv1-yoco": "+skipv1-yoco",
            "fusedkv-lite (ours)": "+fusedkv-lite",
        },
        ("125m", "200m", "355m"),
    ),
    "P3 Figure 15",
    (
        Published(
            "P3 Figure 15",
            "GPT-2 of 125M, 200M and 355M, OpenWebText2, 40k steps",
            LOSS,
            (
                {
                    "baseline": "baseline",
                    "skipv1": "lowest",
                    "skipkv1": "above the baseline",
                    "skipv1-yoco": "slightly above SkipV1, below the baseline",
                    "fusedkv-lite (ours)": "not in the paper",
                },
            ),
        ),
    ),
    ("fusedkv-lite is not in P3; its row is our addition.",),
)


def _gqa_mla() -> dict[str, Setup]:
    mechanisms = (
        {"gqa": "+gqa", "skipv1-gqa": "+skipv1+gqa"},
        {"mla": "+mla", "skipv1-mla": "+skipv1+mla"},
    )
    setups = {
        scale: Setup(tuple(_llama("llama-350m", scale, pair) for pair in mechanisms), notes=(LLAMA_NOTE,))
        for scale in (TINY, SMALL)
    }
    # "The optimizer hyperparameters follow those used for GPT2-355M."
    theirs = BASES["gpt2-355m"].recipe
    recipe = {
        name: getattr(theirs, name)
        for name in (
            *("steps", "batch_size", "learning_rate", "min_learning_rate"),
            *("weight_decay", "warmup_steps", "max_grad_norm"),
        )
    }
    groups = tuple(_llama("llama-350m", PAPER, pair, recipe) for pair in mechanisms)
    note = (
        "The paper trains LLaMA-350M on OpenWebText2 with the optimizer settings of GPT-2 355M; no dropout, clipping "
        "at 1.0, a byte-level BPE of 32,000 trained on the data, and the validation every 500 steps on 1,024 "
        "sequences are ours. Its caption says GPT2-355M, its text LLaMA-350M, which is what runs here."
    )
    setups[PAPER] = Setup(groups, 1, OPENWEBTEXT2, None, 1024, 500, (note,))
    return setups


_TABLE_2 = "LLaMA-350M, OpenWebText2, 40k steps"
GQA_MLA = Suite(
    "With grouped queries and with a latent cache",
    _gqa_mla(),
    "P3 Table 2",
    (
        Published(
            "P3 Table 2",
            _TABLE_2,
            LOSS,
            ({"gqa": "2.912", "skipv1-gqa": "2.893"}, {"mla": "2.896", "skipv1-mla": "2.888"}),
        ),
        Published(
            "P3 Table 2",
            _TABLE_2,
            "perplexity",
            ({"gqa": "18.39", "skipv1-gqa": "18.04"}, {"mla": "18.10", "skipv1-mla": "17.95"}),
        ),
        Published(
            "P3 Table 2",
            _TABLE_2,
            "parameters, millions",
            ({"gqa": "334.7", "skipv1-gqa": "328.9"}, {"mla": "337.4", "skipv1-mla": "334.4"}),
        ),
        Published(
            "P3 Table 2",
            _TABLE_2,
            "KV bytes per token",
            ({"gqa": "98304", "skipv1-gqa": "74752"}, {"mla": "13824", "skipv1-mla": "7680"}),
        ),
    ),
    (
        "P3 Table 2 prints the cache of GQA with 4 bytes an element and that of MLA with 2; ours is in bfloat16, with "
        "2.",
        "The 7,680 bytes of SkipV1-MLA leave out the other half of the first layer's latent; with it they are 7,936, "
        "−42.6% in place of −44.4%.",
    ),
)

_LLAMAS = {"60M": "llama-60m", "130M": "llama-130m", "350M": "llama-350m", "1B": "llama-1b", "3B": "llama-3b"}
_LLAMAS_SMALLER = {size: _LLAMAS[size] for size in ("60M", "130M", "350M")}
_FIGURE_5 = "LLaMA, C4, the steps of Table 4"
LLAMA_SIZES = Suite(
    "SkipV1 against its baseline, size by size",
    {
        TINY: Setup(_sizes(_LLAMAS_SMALLER, TINY, True), notes=(LLAMA_NOTE,)),
        SMALL: Setup(_sizes(_LLAMAS_SMALLER, SMALL, True), notes=(LLAMA_NOTE,)),
        PAPER: Setup(_sizes(_LLAMAS, PAPER, False), 1, C4, None, 1024, 500, (LLAMA_PAPER_NOTE,)),
    },
    "P3 Figure 5, Tables 4 and 5",
    (
        Published(
            "P3 Figure 5(a)",
            _FIGURE_5,
            LOSS,
            _pairs(
                {"60M": "3.549", "130M": "3.229", "350M": "2.931", "1B": "2.723", "3B": "2.664"},
                {"60M": "3.504", "130M": "3.192", "350M": "2.885", "1B": "2.711", "3B": "2.652"},
            ),
        ),
        Published(
            "P3 Figure 5(a)",
            _FIGURE_5,
            "perplexity",
            _pairs(
                {"60M": "34.78", "130M": "25.25", "350M": "18.75", "1B": "15.23", "3B": "14.35"},
                {"60M": "33.25", "130M": "24.34", "350M": "17.90", "1B": "15.04", "3B": "14.18"},
            ),
        ),
        Published(
            "P3 Table 5",
            "LLaMA-1B, C4, 25k steps, mean of seeds 42, 100 and 2025",
            LOSS,
            _pairs({"1B": "2.740"}, {"1B": "2.729"}),
        ),
    ),
    (
        "P3 Table 5, LLaMA-1B with seeds 42, 100 and 2025: baseline 2.723, 2.753 and 2.744 (2.740 ± 0.015), "
        "SkipV1Former 2.711, 2.743 and 2.732 (2.729 ± 0.016).",
    ),
)

_TINYLLAMAS = {"1.1B": "tinyllama-1.1b", "315M": "tinyllama-315m", "125M": "tinyllama-125m"}
_TINYLLAMAS_SMALLER = {size: _TINYLLAMAS[size] for size in ("315M", "125M")}
TINYLLAMA = Suite(
    "SkipV1 with four query heads to a value head",
    {
        TINY: Setup(_sizes(_TINYLLAMAS_SMALLER, TINY, False), notes=(LLAMA_NOTE,)),
        SMALL: Setup(_sizes(_TINYLLAMAS_SMALLER, SMALL, False), notes=(LLAMA_NOTE,)),
        PAPER: Setup(
            _sizes(_TINYLLAMAS, PAPER, False),
            1,
            C4,
            None,
            1024,
            500,
            (LLAMA_PAPER_NOTE, "The paper prints the sizes alone; shapes, recipe and C4 are ours."),
        ),
    },
    "P3 Table 6",
    (
        Published(
            "P3 Table 6",
            "TinyLLaMA with groups of four",
            LOSS,
            _pairs(
                {"1.1B": "2.750", "315M": "2.936", "125M": "3.420"}, {"1.1B": "2.742", "315M": "2.916", "125M": "3.370"}
            ),
        ),
    ),
)

SUITES = {
    "kv-sharing": KV_SHARING,
    "skip-ratio": SKIP_RATIO,
    "skip-ratio-gpt2": SKIP_RATIO_GPT2,
    "skip-layer": SKIP_LAYER,
    "injection": INJECTION,
    "kv-both": KV_BOTH,
    "gqa-mla": GQA_MLA,
    "llama-sizes": LLAMA_SIZES,
    "tinyllama": TINYLLAMA,
}
