"""Published and hand-computed numbers, to the digit: parameters, cache bytes, the spread of attention logits."""

from typing import Any

import pytest
import torch
from shapes import tokens
from transformers import LlamaConfig, LlamaForCausalLM

from leanqkv import LeanConfig, LeanForCausalLM, count_parameters, kv_bytes_per_token, preset
from leanqkv.eliminate import weight_table
from leanqkv.presets.catalog import BASES
from leanqkv.presets.recipes import recipe

# base and mechanisms, overrides, total, non-embedding
COUNTS: list[tuple[tuple[str, ...], dict[str, Any], int, int]] = [
    (("gpt2-124m",), {}, 124_373_760, 84_953_856),
    (("gpt2-124m", "identity-query"), {}, 117_295_872, 77_875_968),
    (("gpt2-124m",), {"intermediate_size": 2688}, 117_295_872, 77_875_968),
    (("gpt2-124m",), {"hidden_size": 744, "intermediate_size": 2976}, 117_915_816, 79_727_784),
    (("gpt2-124m", "identity-query"), {"intermediate_size": 3456}, 124_373_760, 84_953_856),
    (("gpt2-124m", "nonlinear-query"), {}, 124_392_192, 84_972_288),
]


@pytest.mark.parametrize("names, overrides, total, non_embedding", COUNTS, ids=lambda x: str(x))
def test_parameters(names: tuple[str, ...], overrides: dict[str, Any], total: int, non_embedding: int) -> None:
    config = preset(*names, **overrides)
    count = count_parameters(config)
    assert (count.total, count.non_embedding) == (total, non_embedding)
    with torch.device("meta"):
        model = LeanForCausalLM(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) == total
    assert sum(size for name, size in sizes.items() if ".embed_" not in name) == non_embedding


def test_llama_7b_has_as_many_parameters_as_the_models_of_transformers() -> None:
    shape = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_hidden_layers=32)
    with torch.device("meta"):
        stock = LlamaForCausalLM(shape)
    assert count_parameters(preset("llama-7b")).total == stock.num_parameters() == 6_738_415_616


# bytes per token at 4-byte elements
BYTES: list[tuple[tuple[str, ...], int]] = [
    (("gpt2-355m",), 196_608),
    (("gpt2-355m", "gqa"), 98_304),
    (("gpt2-355m", "gqa", "skipv1"), 74_752),
    (("gpt2-355m", "skipv1"), 149_504),
    (("gpt2-355m", "mqa"), 12_288),
    (("gpt2-124m",), 73_728),
    (("gpt2-124m", "identity-query"), 73_728),
    (("gpt2-124m", "skipv1"), 56_832),
    (("llama-7b",), 1_048_576),
    (("llama-7b", "skipv1"), 794_624),  # 75.8 %, P3 Figure 6(b)
]


@pytest.mark.parametrize("names, expected", BYTES, ids=lambda x: str(x))
def test_cache_bytes(names: tuple[str, ...], expected: int) -> None:
    config = preset(*names)
    assert kv_bytes_per_token(config, dtype=torch.float32) == expected
    assert kv_bytes_per_token(config, dtype=torch.bfloat16) == expected // 2
    assert kv_bytes_per_token(config) == expected // 2


@pytest.mark.parametrize("base", BASES)
def test_a_base_has_the_size_in_its_name(base: str) -> None:
    """Within the rounding of the name; non-embedding parameters, or all of them, as each paper counts."""
    size = base.rpartition("-")[2]
    if size in ("tiny", "small", "digits"):
        return
    expected = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    count = count_parameters(preset(base))
    assert min(abs(n / expected - 1) for n in (count.total, count.non_embedding)) < 0.25


# Steps, batch, peak rate, minimum rate, weight decay as the papers print them: P1 Table 2 and section 5, P2 section 4,
# P3 Tables 3 and 4.
PAPERS: dict[str, tuple[int, int, float, float, float]] = {
    "gpt2-124m": (60_000, 480, 6e-4, 6e-5, 0.1),
    "gpt2-124m+identity-query:recipe=p1": (100_000, 480, 6e-4, 6e-5, 2**-5),
    "gpt2-124m+nonlinear-query": (60_000, 480, 3e-3, 3e-5, 2**-5),
    "gpt2-125m": (40_000, 120, 1e-3, 1e-4, 0.1),
    "gpt2-200m": (40_000, 120, 1e-3, 1e-4, 0.1),
    "gpt2-355m": (40_000, 120, 1e-3, 1e-4, 0.1),
    "gpt2-550m": (40_000, 120, 6e-4, 6e-5, 0.1),
    "llama-60m": (2_500, 512, 2e-3, 2e-4, 0.0),
    "llama-130m": (5_000, 512, 2e-3, 2e-4, 0.0),
    "llama-350m": (15_000, 512, 2e-3, 2e-4, 0.0),
    "llama-1b": (25_000, 512, 1e-3, 1e-4, 0.1),
    "llama-3b": (30_000, 512, 5e-4, 5e-5, 0.1),
}


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_are_the_papers(name: str) -> None:
    own = recipe(name)
    printed = (own.steps, own.batch_size, own.learning_rate, own.min_learning_rate, own.weight_decay)
    assert printed == pytest.approx(PAPERS[name])
    assert own.warmup_steps == (2_000 if name.startswith("gpt2-124m") else own.steps / 10)
    # "No weight decay and gradient clipping" for the smaller LLaMAs.
    assert (own.max_grad_norm is None) == (own.weight_decay == 0)


def test_the_later_recipe_of_the_identity_query_is_the_papers_as_far_as_it_can_be_read() -> None:
    """P1b section 5: 60k steps, the standard weight decay, and a higher rate that falls to less than the baseline's."""
    own, base = recipe("gpt2-124m+identity-query"), recipe("gpt2-124m")
    same = ("steps", "batch_size", "weight_decay", "warmup_steps", "schedule_steps", "max_grad_norm")
    assert [getattr(own, name) for name in same] == [getattr(base, name) for name in same]
    assert own.learning_rate > base.learning_rate and own.min_learning_rate < base.min_learning_rate
    assert recipe("gpt2-124m+identity-query:recipe=p1").schedule_steps == 600_000


def logit_spread(config: LeanConfig, scaled: bool) -> float:
    """Standard deviation of the first layer's attention logits at the start, over 1 / sqrt(head_dim) or as used."""
    torch.manual_seed(0)
    model = LeanForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    seen = {}
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(lambda _m, _in, output, name=name: seen.update({name: output}))
    with torch.no_grad():
        model(input_ids=tokens(4, 64, vocab_size=config.vocab_size))
    query, key = (x.unflatten(-1, (12, 64)).transpose(1, 2) for x in (seen["q_proj"], seen["k_proj"]))
    scale = config.plan.layers[0].attention_scale(0) if scaled else 64**-0.5
    return (query @ key.transpose(-1, -2) * scale).std().item()


@pytest.mark.slow
def test_initial_logit_spread() -> None:
    """An identity query spreads the logits 1.8 times as wide as a linear one; half the scale brings it back to 0.9."""
    small = {"num_hidden_layers": 1, "vocab_size": 1000}
    baseline = logit_spread(preset("gpt2-124m", **small), scaled=True)
    assert baseline == logit_spread(preset("gpt2-124m", **small), scaled=False)
    identity = preset("gpt2-124m", "identity-query", **small)
    full_scale = preset("gpt2-124m", "identity-query:scale=1.0", **small)
    assert logit_spread(full_scale, scaled=True) / baseline == pytest.approx(1.8, abs=0.1)
    assert logit_spread(identity, scaled=False) / baseline == pytest.approx(1.8, abs=0.1)
    assert logit_spread(identity, scaled=True) / baseline == pytest.approx(0.9, abs=0.05)


def test_initial_weights_have_the_configured_spread() -> None:
    torch.manual_seed(0)
    config = preset("gpt2-124m", "nonlinear-query", num_hidden_layers=2, vocab_size=1000, norm_bias=True, mlp_bias=True)
    for name, parameter in LeanForCausalLM(config).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
            continue
        writes_residual = "o_proj" in name or "mlp.down_proj" in name
        expected = 0.02 / 2 if writes_residual else 0.02  # 2 layers: 1 / sqrt(2 * 2)
        assert parameter.std().item() == pytest.approx(expected, rel=0.02), name
        assert abs(parameter.mean().item()) < expected / 50, name


# Graef 2024 (P4), section 4: the table, its totals as printed in billions
P4_TABLE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Pythia-6.9B": (
        {"num_key_value_heads": 32, "mlp_type": "mlp", "intermediate_size": 16384, "vocab_size": 50400},
        {
            "Q+P weights per layer": "33,554,432",
            "K+V weights per layer": "33,554,432",
            "FFN weights per layer": "134,217,728",
            "input and output embeddings": "412,876,800",
            "total weights": "6.9B",
            "total without Q and P": "5.8B",
            "weight savings": "16%",
            "possible speedup at batch 1": "1.19x",
        },
    ),
    "Mistral-7B": (
        {"num_key_value_heads": 8, "mlp_type": "gated", "intermediate_size": 14336, "vocab_size": 32000},
        {
            "Q+P weights per layer": "33,554,432",
            "K+V weights per layer": "8,388,608",
            "FFN weights per layer": "176,160,768",
            "input and output embeddings": "262,144,000",
            "total weights": "7.2B",
            "total without Q and P": "6.2B",
            "weight savings": "15%",
            "possible speedup at batch 1": "1.17x",
        },
    ),
}


def as_printed(row: str, value: float) -> str:
    if row.startswith("total"):
        return f"{value / 1e9:.1f}B"
    if row == "weight savings":
        return f"{value:.0%}"
    return f"{value:.2f}x" if row.startswith("possible") else f"{value:,}"


@pytest.mark.parametrize("name", P4_TABLE)
def test_weights_without_query_and_output(name: str) -> None:
    shape, printed = P4_TABLE[name]
    config = LeanConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, **shape)
    assert {row: as_printed(row, value) for row, value in weight_table(config).items()} == printed
