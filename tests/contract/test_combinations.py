"""Every mechanism with every other: built and right, or refused with a reason. There is no third outcome."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, islice, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tokens
from transformers import DynamicCache

from leanqkv import ConfigError, LeanConfig, LeanForCausalLM, cache_bytes, kv_bytes_per_token, preset
from leanqkv.model.plan import make_plan
from leanqkv.model.shapes import parameter_shapes

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 19,
    "max_position_embeddings": 16,
}
# Axis -> choice -> mechanisms in a model's name, overrides.
AXES: dict[str, dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "query": {name: ((f"{name}-query",), {}) for name in ("identity", "nonlinear", "residual", "mlp")}
    | {"linear": ((), {})},
    "sharing": {
        "none": ((), {}),
        **{
            name: ((name,), {})
            for name in (
                *("skipv1", "skipv2", "skipv0", "skipkv1", "skipv1-yoco", "svformer", "resformer", "yoco-v", "yoco"),
                *("cla-v", "cla", "fusedkv-lite", "skipv1:injection=pooling", "skipv1:injection=dynamic"),
                *("skipv1:injection=odd_even", "skipv1:injection=resformer", "resformer:mode=per_token"),
                "borrowed-values",
            )
        },
        "single heads": ((), {"key_value": {"type": "borrowed_values", "heads": [[1, 0, 0, 0], [3, 0, 2, 0]]}}),
    },
    "heads": {"MHA": ((), {}), "GQA": (("gqa",), {}), "MQA": (("mqa",), {}), "MLA": (("mla",), {})},
    "value": {
        "linear": ((), {}),
        "nonlinear, as the key": (("nonlinear-key:anchor=linear", "nonlinear-value:anchor=linear"), {}),
        "keys": (("keys-as-values",), {}),
        "latent": (("latent-values",), {}),
        "beside latent keys": (("latent-keys",), {}),
        "latent beside latent keys": (("latent-keys", "latent-values:keys=true"), {}),
    },
    "position": {name: ((), {"position_embedding_type": name}) for name in ("learned", "rope", "none")},
    "norm": {name: ((), {"norm_type": name}) for name in ("layernorm", "rmsnorm", "dyt", "none")},
    "block": {name: ((), {"block_type": name}) for name in ("serial", "parallel", "parallel_shared_norm")},
    "skips": {
        "both": ((), {}),
        "attention": ((), {"mlp_skip": False}),
        "MLP": ((), {"attention_skip": False}),
        "none": ((), {"attention_skip": False, "mlp_skip": False}),
    },
    "depth": {"plain": ((), {}), "dense": (("denseformer",), {}), "gated": (("output-gate",), {})}
    | {mode: ((f"hyper-connections:streams=2,mode={mode}",), {}) for mode in ("static", "dynamic", "mhc")},
}
Combination = dict[str, str]


def every_combination() -> Iterator[Combination]:
    for chosen in product(*AXES.values()):
        yield dict(zip(AXES, chosen, strict=True))


def spread_combinations() -> Iterator[Combination]:
    """Yield every 29th: no axis has a multiple of 29 choices, so all of them meet."""
    assert all(len(choices) % 29 for choices in AXES.values())
    return islice(every_combination(), 0, None, 29)


def parts(combination: Combination) -> tuple[list[str], dict[str, Any]]:
    names: list[str] = []
    overrides: dict[str, Any] = {}
    for axis, choice in combination.items():
        more, fields = AXES[axis][choice]
        names += more
        overrides |= fields
    return names, overrides


def configure(combination: Combination) -> LeanConfig:
    names, overrides = parts(combination)
    return preset("tiny", *names, **SHAPE, **overrides)


def reason(combination: Combination) -> str | None:
    """Why a combination has no meaning; written from what the mechanisms are, not from the code that refuses them."""
    sharing, heads, value = (combination[axis] for axis in ("sharing", "heads", "value"))
    if combination["block"] != "serial" and combination["skips"] in ("attention", "MLP"):
        return "a parallel block has one skip"
    if combination["depth"] in ("static", "dynamic", "mhc") and combination["skips"] != "both":
        return "hyper-connections take the place of both skips"
    if heads == "MLA" and value == "keys":
        return "the latent already is key and value"
    if heads == "MLA" and sharing in ("skipkv1", "skipv0"):
        return "one rotary key has no halves; a latent has no heads to leave out"
    if heads == "MQA" and sharing.startswith(("skipv1", "skipv2", "skipv0", "skipkv1", "borrowed-values")):
        return "half of one head is none"
    if heads == "MLA" and sharing in ("borrowed-values", "single heads"):
        return "a latent has no heads to borrow"
    if ("latent" in value or "nonlinear" in value) and heads == "MLA":
        return "the latent already is key and value"
    if "latent" in value and sharing != "none":
        return "what is kept has no heads to share"
    if value == "keys" and sharing == "single heads" and heads != "MQA":
        return "the keys that are values are the first ones, and here the first value is borrowed"
    if value == "keys" and sharing == "skipv1-yoco":
        return "the upper layers have no keys of their own to use as values"
    return None


def test_the_whole_product_is_planned_or_refused() -> None:
    """On the plans, which is where everything but a few fields' own ranges is decided."""
    template = vars(preset("tiny", **SHAPE))
    fields: dict[tuple[str, str], dict[str, Any]] = {}
    for axis, choices in AXES.items():
        for choice in choices:
            if (axis, choice) == ("heads", "MLA"):
                continue  # its widths depend on the positions
            names, overrides = AXES[axis][choice]
            config = vars(preset("tiny", *names, **SHAPE, **overrides))
            fields[axis, choice] = {name: value for name, value in config.items() if value != template[name]}
    outcomes = {True: 0, False: 0}
    for combination in spread_combinations():
        if combination["block"] != "serial" and combination["skips"] in ("attention", "MLP"):
            continue  # refused by the configuration itself, see below
        config = dict(template)
        for pair in combination.items():
            config |= fields.get(pair, {})
        if combination["heads"] == "MLA":
            config |= {"kv_lora_rank": 16, "qk_rope_head_dim": 2 if combination["position"] == "rope" else 0}
        expected = reason(combination)
        try:
            make_plan(SimpleNamespace(**config))
        except ConfigError as error:
            assert expected is not None, f"{combination} is refused: {error}"
            assert len(str(error)) > 40, f"{combination}: {error}"
        else:
            assert expected is None, f"{combination} is planned, although {expected}"
        outcomes[expected is None] += 1
    assert min(outcomes.values()) > 1000, outcomes


def test_a_parallel_block_has_one_skip() -> None:
    for block, skips in product(("parallel", "parallel_shared_norm"), ("attention", "MLP")):
        plain = {axis: next(iter(choices)) for axis, choices in AXES.items()}
        with pytest.raises(ConfigError, match="one skip connection"):
            configure(plain | {"block": block, "skips": skips})


@cache
def sampled() -> list[Combination]:
    """Of everything that has a meaning, enough that every two choices of different axes meet, and 320 more."""
    meaningful = [combination for combination in spread_combinations() if reason(combination) is None]
    random.Random(0).shuffle(meaningful)
    met: set[tuple] = set()
    chosen, others = [], []
    for combination in meaningful:
        pairs = set(combinations(sorted(combination.items()), 2))
        (others if pairs <= met else chosen).append(combination)
        met |= pairs
    return chosen + others[:320]


def check(combination: Combination) -> None:
    """Cached in two pieces equals uncached; the cache holds what the plan says; every tensor is the plan's."""
    config = configure(combination)
    model = randomize(LeanForCausalLM(config), std=0.3).double().eval()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(config)
    ids = tokens(2, 7, vocab_size=19)
    full = model(input_ids=ids, labels=ids)
    assert full.logits.isfinite().all()
    with torch.no_grad():
        filled = DynamicCache(config=config)
        pieces = [model(input_ids=piece, past_key_values=filled).logits for piece in ids.split([4, 2, 1], dim=1)]
    assert_near(torch.cat(pieces, dim=1), full.logits, 1e-10)
    assert cache_bytes(filled) == 2 * 7 * kv_bytes_per_token(config, dtype=torch.float64)
    full.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.long_cases
@pytest.mark.parametrize("sharing", AXES["sharing"])
def test_samples_of_all_others_are_built(sharing: str) -> None:
    chosen = [combination for combination in sampled() if combination["sharing"] == sharing]
    assert len(chosen) >= 10
    for combination in chosen:
        check(combination)


def test_the_samples_let_every_two_choices_meet() -> None:
    met = {pair for combination in sampled() for pair in combinations(sorted(combination.items()), 2)}
    for (one, choices), (other, others) in combinations(AXES.items(), 2):
        for choice, another in product(choices, others):
            combination = {one: choice, other: another}
            plain = {axis: next(iter(of)) for axis, of in AXES.items()} | {"sharing": "none", "query": "linear"}
            if reason(plain | combination) is None:
                assert tuple(sorted(combination.items())) in met, combination
