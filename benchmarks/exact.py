"""Exact eliminations at GPT-2 small's shape: how far the logits move, what bfloat16 costs, what is saved and how fast.

Weights are drawn N(0, 0.02^2) from a fixed seed. `plain` is the textbook form, `quiet` the equal one that is taken
(eliminate/forms.py). The hub's LayerNorm-free GPT-2 is built as published: epsilon 1e12, norm weights of 1e6 gamma,
biases everywhere, tied head. Decoding is timed at batch 1 in turns, a block of tokens each: `ratio` is eliminated /
original, the median over the pairs.

    python benchmarks/exact.py --out results/exact/gpt2-small.json
    python benchmarks/exact.py --tables results/exact/gpt2-small.json
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from leanqkv import LeanConfig, LeanForCausalLM, preset
from leanqkv.checkpoints.disabled_norms import without_norms
from leanqkv.checkpoints.open import open_checkpoint
from leanqkv.eliminate import parse_request, transform, weight_table
from leanqkv.eliminate.certify import DTYPES, difference, logits, random_inputs
from leanqkv.model.shapes import count_parameters, parameter_shapes

NONE = {"norm_type": "none"}
NO_SKIPS = {"attention_skip": False, "mlp_skip": False}
# What is removed, from which layer (None: all), and the shape it is exact for.
CASES: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "query of layer 3, all skips (P1 Thm 4.2)": ("query", 3, NONE),
    "query, attention skip only (P1 Thm 4.4)": ("query", None, NONE | {"mlp_skip": False}),
    "query, one shared block (P1 Thm 4.3)": ("query", None, NONE | {"num_hidden_groups": 1}),
    "query and output, skipless (P4 Table 1)": ("query,output", None, NONE | NO_SKIPS),
    "value and output, skipless (P4 Table 1)": ("value,output", None, NONE | NO_SKIPS),
    "output, skipless parallel (P4 section 2)": ("output", None, NONE | NO_SKIPS | {"block_type": "parallel"}),
    "identity blocks, LayerNorm (P1 Prop. 3.2)": ("block-diagonal", None, {}),
}
# P4's table, from its shapes.
SHAPES: dict[str, dict[str, Any]] = {
    "Pythia-6.9B": {"num_key_value_heads": 32, "mlp_type": "mlp", "intermediate_size": 16384, "vocab_size": 50400},
    "Mistral-7B": {"num_key_value_heads": 8, "mlp_type": "gated", "intermediate_size": 14336, "vocab_size": 32000},
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "shape": "gpt2-124m",
        "cases": [case(name, *how) for name, how in CASES.items()],
        "layernorm_free": layernorm_free(),
        "speed": speed(options.pairs, options.tokens),
        "weight_table": {name: weight_table(big(shape)) for name, shape in SHAPES.items()},
    }


def big(shape: dict[str, Any]) -> LeanConfig:
    return LeanConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, max_position_embeddings=2048, **shape
    )


def draw(config: LeanConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(shape, generator=generator) * 0.02 for n, shape in parameter_shapes(config).items()}
    return {n: tensor + 1 if "norm" in n and n.endswith("weight") else tensor for n, tensor in tensors.items()}


def distances(before: tuple, after: tuple, inputs: dict) -> dict[str, Any]:
    """Return by dtype how far `before`, and `after` with rounded weights, are from `before` in float64."""
    reference = logits(*before, inputs, torch.float64)
    by_dtype: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        stored = {n: tensor.to(dtype) for n, tensor in after[1].items()}
        by_dtype[name] = {
            "original": difference(logits(*before, inputs, dtype), reference),
            "result": difference(logits(after[0], stored, inputs, dtype), reference),
        }
    return by_dtype


def case(name: str, remove: str, layer: int | None, shape: dict[str, Any]) -> dict[str, Any]:
    config = preset("gpt2-124m", **shape)
    before = config, draw(config)
    row: dict[str, Any] = {"name": name, "remove": remove, "layer": layer, "fields": shape}
    for form in ("plain", "quiet"):
        start = time.perf_counter()
        result = transform(*before, parse_request(remove, layer, balance=form == "quiet"))
        after = result.config, dict(result.tensors)
        seconds = time.perf_counter() - start
        row[form] = {
            "condition": max(result.conditions.values(), default=None),
            "seconds": seconds,
            "distance": distances(before, after, random_inputs(config)),
        }
        row["parameters"] = {
            "before": count_parameters(config).total,
            "after": count_parameters(result.config).total,
        }
        show = {dtype: f"{pair['result']['relative']:.1e}" for dtype, pair in row[form]["distance"].items()}
        print(f"{name:44} {form:6} condition {row[form]['condition'] or 0:8.0f}  {show}", flush=True)
    return row


def layernorm_free() -> dict[str, Any]:
    """Measure a random model built as the hub's: the naive change of basis is singular, the centered one exact."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(layer_norm_epsilon=1e12)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = torch.randn(parameter.shape, generator=generator)
            gamma = ".ln_" in name and name.endswith("weight")
            parameter.copy_(1e6 * (1 + 0.1 * draws) if gamma else 0.02 * draws)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        opened = open_checkpoint(Path(directory))
        before = opened.config, dict(opened.tensors)
        layer = 3
        block = f"model.layers.{layer}"
        query = before[1][f"{block}.self_attn.q_proj.weight"].double()
        folded = query * before[1][f"{block}.input_layernorm.weight"].double() * 1e-6
        naive = torch.linalg.svdvals(folded - folded.mean(1, keepdim=True))
        centred = torch.linalg.svdvals(folded)
        inputs = random_inputs(opened.config)
        free = without_norms(*before)
        reference = logits(*free, inputs, torch.float64)
        trick = difference(logits(*before, inputs, torch.float64), reference)
        result = transform(*before, parse_request("query", layer))
        distance = distances(free, (result.config, dict(result.tensors)), inputs)
    measured = {
        "layer": layer,
        "naive": {"smallest": float(naive[-1]), "largest": float(naive[0]), "condition": float(naive[0] / naive[-1])},
        "centred": {"smallest": float(centred[-1]), "condition": float(centred[0] / centred[-1])},
        "condition": max(result.conditions.values()),
        "epsilon": trick,
        "distance": distance,
        "parameters": {
            "before": count_parameters(opened.config).total,
            "after": count_parameters(result.config).total,
        },
    }
    print("LayerNorm-free:", {k: measured[k] for k in ("naive", "centred", "condition")}, flush=True)
    return measured


@torch.no_grad()
def speed(pairs: int, tokens: int) -> list[dict[str, Any]]:
    """Time greedy decoding at batch 1 in float32, with and without the removed weights."""
    rows = []
    for name in ("query, attention skip only (P1 Thm 4.4)", "query and output, skipless (P4 Table 1)"):
        remove, layer, shape = CASES[name]
        config = preset("gpt2-124m", **shape)
        tensors = draw(config)
        result = transform(config, tensors, parse_request(remove, layer))
        models = []
        for of, its in ((config, tensors), (result.config, result.tensors)):
            model = LeanForCausalLM(of)
            stored = {n: tensor.float() for n, tensor in its.items()}
            model.load_state_dict(
                stored | {"lm_head.weight": stored.get("lm_head.weight", stored["model.embed_tokens.weight"])}
            )
            models.append(model.eval())
        prompt = random_inputs(config, 1, 16)["input_ids"]

        def once(model: Any, prompt: torch.Tensor = prompt) -> float:
            start = time.perf_counter()
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
            return tokens / (time.perf_counter() - start)

        for model in models:
            once(model)
        rates = [(once(models[0]), once(models[1])) for _ in range(pairs)]
        ratios = [after / before for before, after in rates]
        sizes = [sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) for model in models]
        rows.append(
            {
                "name": name,
                "tokens_per_second": [median(rate) for rate in zip(*rates, strict=True)],
                "ratio": harness.spread(ratios),
                "parameters": sizes,
                "predicted": sizes[0] / sizes[1],
            }
        )
        print(rows[-1], flush=True)
    return rows


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of docs/exact.md as Markdown, by what they show."""
    return {
        "cases": case_table(record["cases"]),
        "layernorm_free": layernorm_free_table(record["layernorm_free"]),
        "speed": speed_table(record["speed"]),
        "weights": weights_table(record["weight_table"]),
    }


def case_table(cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        original = case["plain"]["distance"]["bf16"]["original"]["relative"]
        for form in ("plain", "quiet"):
            measured = case[form]
            name = case["name"] if form == "plain" else ""
            condition = "–" if measured["condition"] is None else f"{measured['condition']:,.0f}"
            errors = (f"{measured['distance'][dtype]['result']['relative']:.1e}" for dtype in ("fp64", "fp32", "bf16"))
            rows.append((name, form, condition, *errors, f"{original:.1e}"))
    return harness.table(("what goes", "form", "condition", "fp64", "fp32", "bf16", "bf16 itself"), rows)


def layernorm_free_table(free: dict[str, Any]) -> str:
    errors = {dtype: pair["result"]["relative"] for dtype, pair in free["distance"].items()}
    naive, centred = free["naive"], free["centred"]
    sizes = f"{free['parameters']['before']:,} → {free['parameters']['after']:,}"
    rows = [
        ("naive Θ = C diag(γ) W_Q, smallest singular value", f"{naive['smallest']:.1e}, singular"),
        ("Θ = diag(γ) W_Q, smallest singular value", f"{centred['smallest']:.1e}"),
        ("its condition number, that of the form taken", f"{centred['condition']:,.0f}, {free['condition']:,.0f}"),
        ("logits against the function without norms, fp64", f"{errors['fp64']:.1e}"),
        ("the same in fp32, in bf16", f"{errors['fp32']:.1e}, {errors['bf16']:.1e}"),
        ("the epsilon itself: the checkpoint against the function without norms", f"{free['epsilon']['relative']:.1e}"),
        ("parameters", f"{sizes}, for the head is untied"),
    ]
    return harness.table(("LayerNorm-free GPT-2, W_Q of layer 3", ""), rows)


def speed_table(speeds: list[dict[str, Any]]) -> str:
    rows = []
    for speed in speeds:
        (before, after), ratio = speed["parameters"], speed["ratio"]
        measured = f"{ratio['median']:.2f}× ({ratio['min']:.2f}–{ratio['max']:.2f})"
        sizes = (f"{before:,}", f"{after:,}", f"{1 - after / before:.1%}")
        rows.append((speed["name"], *sizes, f"{speed['predicted']:.2f}×", measured))
    headers = ("what goes", "parameters", "after", "saved", "predicted", "measured at batch 1")
    return harness.table(headers, rows)


def weights_table(models: dict[str, dict[str, float]]) -> str:
    names = next(iter(models.values()))
    rows = [(name, *(_as_printed(name, model[name]) for model in models.values())) for name in names]
    return harness.table(("", *models), rows)


def _as_printed(row: str, value: float) -> str:
    if row.startswith("total"):
        return f"{value / 1e9:.1f}B"
    if row == "weight savings":
        return f"{value:.0%}"
    return f"{value:.2f}×" if row.startswith("possible") else f"{value:,}"


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of timed blocks of decoding")
    parser.add_argument("--tokens", type=int, default=48, help="of a block")
    harness.run(parser, measure, lambda record: "\n\n".join(tables(record).values()))


if __name__ == "__main__":
    main()
