"""Eliminations after one another, identities written out again, classes of transformers."""

import random
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from exact_models import (
    BIASES,
    IDS,
    ROUNDING,
    SKIPLESS,
    elements,
    logits,
    random_config,
    relative,
    small,
    tolerance,
    weights,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from leanqkv import LeanConfig, LeanError
from leanqkv.checkpoints.dense import to_dense
from leanqkv.checkpoints.write import as_stock
from leanqkv.eliminate import parse_request, transform
from leanqkv.eliminate.transform import Transformed
from leanqkv.model.shapes import parameter_shapes


def apply(start: tuple[LeanConfig, dict[str, Tensor]], *steps: tuple[str, int | None]) -> list[Transformed]:
    """Each step on the result of the one before."""
    results = [Transformed(*start)]
    for remove, layer in steps:
        results.append(transform(results[-1].config, dict(results[-1].tensors), parse_request(remove, layer)))
    return results


def check(results: list[Transformed]) -> None:
    """Each computes what the one before does, to what its own conditions allow."""
    before: Tensor | None = None
    for model in results:
        computed = logits(model.config, model.tensors)
        if before is not None:
            assert relative(computed, before) <= tolerance(model.conditions)
        before = computed


STEPS: dict[str, tuple[dict, tuple[tuple[str, int | None], ...]]] = {
    "queries one by one": ({"mlp_skip": False}, (("query", 0), ("query", 2), ("query", 1))),
    "one of each": ({"mlp_skip": False}, (("value", 1), ("key", 0), ("query", 2))),
    "skipless, from both ends": (
        SKIPLESS,
        (("output", 2), ("query", 0), ("output", 0), ("key", 2), ("value,output", 1)),
    ),
    "query, then identity blocks": ({}, (("query", 1), ("block-diagonal", None))),
    "skipless, then identity blocks": (SKIPLESS, (("output", 1), ("query", None), ("block-diagonal", None))),
    "parallel, the last output": (
        {**SKIPLESS, "block_type": "parallel"},
        (("output", 2), ("query", 0), ("query", 1), ("query", 2)),
    ),
    "a shared block": ({"num_hidden_groups": 1}, (("value", 0), ("block-diagonal", None))),
    "first values": (
        {"mlp_skip": False, "num_attention_heads": 4, "key_value": {"type": "first_layer_values"}},
        (("query", None), ("block-diagonal", None)),
    ),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", STEPS)
def test_one_after_another(case: str, tied: bool) -> None:
    fields, steps = STEPS[case]
    config = small(num_hidden_layers=3, tie_word_embeddings=tied, **BIASES, **fields)
    results = apply((config, weights(config)), *steps)
    check(results)
    for one, other in pairwise(results):
        fewer = elements(one.tensors) - elements(other.tensors)
        assert fewer > 0 or (tied and not other.config.tie_word_embeddings)


def test_one_by_one_is_all_at_once() -> None:
    config = small(num_hidden_layers=3, mlp_skip=False)
    *_, last = apply((config, weights(config)), ("query", 0), ("query", 1), ("query", 2))
    together = transform(config, weights(config), parse_request("query"))
    assert last.config.plan == together.config.plan
    assert last.config.tie_word_embeddings == together.config.tie_word_embeddings
    assert last.config.tie_word_embeddings


@pytest.mark.parametrize("remove, layer", [("query", 1), ("query", 0), ("output", 1), ("block-diagonal,query", None)])
def test_a_basis_serves_once(remove: str, layer: int | None) -> None:
    config = small()
    first = transform(config, weights(config), parse_request("query", 0))
    with pytest.raises(LeanError, match=r"\w+ \w+ \w+"):
        transform(first.config, first.tensors, parse_request(remove, layer))


# --- written out ------------------------------------------------------------------------------------------------------


def is_written_out(config: LeanConfig) -> bool:
    """Nothing is left that is a linear map without a plain matrix."""
    kinds = {getattr(layer, slot).kind for layer in config.plan.layers for slot in ("query", "key", "value", "output")}
    return kinds <= {"linear", "nonlinear", "from_mlp", "keys"}


@pytest.mark.parametrize("seed", range(60))
def test_written_out_is_the_same_function(seed: int) -> None:
    config = random_config(random.Random(seed))
    tensors = weights(config, seed)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    plain, plain_tensors = to_dense(config, tensors)
    assert is_written_out(plain)
    assert {name: tuple(plain_tensors[name].shape) for name in plain_tensors} == parameter_shapes(plain)
    assert relative(logits(plain, plain_tensors), logits(config, tensors)) <= ROUNDING
    assert all(torch.equal(tensors[name], before[name]) for name in before)


IDENTITIES: list[dict] = [
    {"query": [{"type": "identity"}]},
    {"query": [{"type": "identity", "bias": True, "layers": [1]}], "attention_bias": True},
    {"query": [{"type": "identity", "bias": True, "layers": [1]}]},
    {"query": [{"type": "residual", "scale": 0.3}], "attention_bias": True},
    {"key": [{"type": "identity", "layers": [0]}], "query": [{"type": "identity", "layers": [1]}]},
    {"key": [{"type": "identity"}], "query": [{"type": "identity"}], "position_embedding_type": "rope"},
    {
        "key": [{"type": "identity", "bias": True, "layers": [0]}],
        "key_value": {"type": "shared_adjacent", "keys": True},
    },
    {"value": [{"type": "identity", "bias": True}], "key_value": {"type": "first_layer_values", "ratio": 0.34}},
    {"output": [{"type": "identity", "bias": True, "layers": [0]}]},
    {
        "value": [{"type": "identity", "bias": True, "layers": [0]}],
        "key_value": {"type": "borrowed_values", "heads": [[0, 1, 0, 0], [1, 0, 0, 2], [1, 2, 1, 1]]},
    },
    {"key": [{"type": "block_identity", "start": 3}], "value": [{"type": "block_identity", "start": 8}]},
    {"key": [{"type": "block_identity", "start": 2, "width": 2}], "num_key_value_heads": 1, **BIASES},
    {"query": [{"type": "identity"}], "qk_norm": True},
    {"query": [{"type": "residual", "scale": 0.5}], "qk_norm": True},
    {"key": [{"type": "identity"}], "qk_norm": True},
    {"query": [{"type": "from_mlp", "scale": 0.5}], "attention_bias": True},
    {"query": [{"type": "nonlinear", "anchor": "linear"}], "value": [{"type": "identity", "bias": True}]},
    {"query": [{"type": "identity"}], "key": [{"type": "nonlinear"}], "value": [{"type": "nonlinear", "layers": [1]}]},
    {"query": [{"type": "identity", "bias": True}], "kv_lora_rank": 5},
    {"query": [{"type": "identity", "scale": 0.7}], "qk_norm": True, "num_hidden_groups": 1},
    {
        "key": [{"type": "identity", "scale": 0.7}],
        "qk_norm": True,
        "key_value": {"type": "shared_middle", "keys": True},
    },
]


def test_every_identity_can_be_written_out() -> None:
    for fields, norm in product(IDENTITIES, ("rmsnorm", "none")):
        config = small(norm_type=norm, **fields)
        tensors = weights(config)
        plain, plain_tensors = to_dense(config, tensors)
        assert is_written_out(plain), fields
        assert relative(logits(plain, plain_tensors), logits(config, tensors)) <= ROUNDING, fields


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(
    "key", [{"type": "identity"}, {"type": "identity", "bias": True}, {"type": "block_identity", "start": 5}], ids=str
)
def test_keys_that_are_values_stay(key: dict, rotary: bool) -> None:
    """What else there is beside them is written out."""
    positions = {"position_embedding_type": "rope" if rotary else "learned"}
    query = [{"type": "identity", "bias": True}]
    config = small(key=[key], value=[{"type": "keys"}], query=query, **positions)
    tensors = weights(config)
    plain, plain_tensors = to_dense(config, tensors)
    assert {layer.query.kind for layer in plain.plan.layers} == {"linear"}
    assert relative(logits(plain, plain_tensors), logits(config, tensors)) <= ROUNDING


# --- classes of transformers ------------------------------------------------------------------------------------------

NORMED = {"norm_bias": True, "norm_type": "layernorm", **BIASES}
LLAMA = {"norm_type": "rmsnorm", "position_embedding_type": "rope", "mlp_type": "gated", "hidden_act": "silu"}
# Where the class of transformers computes its norms or its positions in float32, no more can be asked for.
STOCK: dict[str, tuple[dict, str, str, float]] = {
    "llama": ({**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2}, "block-diagonal", "llama", 1e-5),
    "llama tied": ({**LLAMA, "tie_word_embeddings": True}, "block-diagonal", "llama", 1e-5),
    "qwen2": ({**LLAMA, "attention_bias": True}, "block-diagonal", "qwen2", 1e-5),
    "qwen3": ({**LLAMA, "qk_norm": True, "head_dim": 6, "num_key_value_heads": 1}, "block-diagonal", "qwen3", 1e-5),
    "qwen3, identity query": ({**LLAMA, "qk_norm": True, "query": [{"type": "identity"}]}, "", "qwen3", 1e-5),
    "llama, identities": (
        {**LLAMA, "query": [{"type": "identity"}], "value": [{"type": "identity", "layers": [1]}]},
        "",
        "llama",
        1e-5,
    ),
    "gpt2": (NORMED, "block-diagonal", "gpt2", ROUNDING),
    "gpt2 single head": ({**NORMED, "num_attention_heads": 1}, "single-head", "gpt2", ROUNDING),
    "gpt2 single head, no biases": (
        {"norm_type": "layernorm", "num_attention_heads": 1},
        "single-head",
        "gpt2",
        ROUNDING,
    ),
    "neox": (
        {
            **NORMED,
            "block_type": "parallel",
            "position_embedding_type": "rope",
            "rope_parameters": {"partial_rotary_factor": 0.5},
            "tie_word_embeddings": False,
        },
        "block-diagonal",
        "gpt_neox",
        1e-5,
    ),
}


@pytest.mark.parametrize("case", STOCK)
def test_results_as_classes_of_transformers(case: str, tmp_path: Path) -> None:
    fields, remove, family, rounding = STOCK[case]
    config = small(**{"tie_word_embeddings": False, **fields})
    tensors = weights(config)
    result = transform(config, tensors, parse_request(remove)) if remove else Transformed(config, tensors)
    stock, stock_tensors = as_stock(result.config, result.tensors)
    assert stock.model_type == family
    stock.save_pretrained(tmp_path)
    save_file({name: stock_tensors[name].contiguous() for name in stock_tensors}, tmp_path / "model.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        computed = model.eval()(input_ids=IDS).logits
    assert relative(computed, logits(config, tensors)) <= max(rounding, tolerance(result.conditions))


@pytest.mark.parametrize(
    "fields", [{}, {"norm_type": "dyt"}, {"norm_type": "rmsnorm", "block_type": "parallel"}], ids=str
)
def test_what_no_class_can_hold_is_refused(fields: dict) -> None:
    config = small(**fields)
    with pytest.raises(LeanError, match=r"\w+ \w+ \w+"):
        dict(as_stock(config, weights(config))[1])
