"""Eliminations under hyper-connections (Karbevski & Mijoski 2025, section 6): the streams have one common basis."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from exact_models import BIASES, build, logits, relative, small, tolerance, weights
from expected_eliminations import weights_fewer
from torch import Tensor
from torch.func import functional_call, jacrev

from leanqkv import LeanConfig, LeanError
from leanqkv.eliminate import parse_request, transform
from leanqkv.model.hyper_connections import MODES
from leanqkv.model.shapes import count_parameters

ALL_OF = {  # every result that holds: what goes, of which layers, and from which models
    "one query": ("query", "1", {}),
    "one key": ("key", "0", BIASES),
    "one value": ("value", "1", {"tie_word_embeddings": False}),
    "one output": ("output", "0", {}),
    "one query, parallel": ("query", "1", {"block_type": "parallel"}),
    "shared block": ("query", None, {"num_hidden_groups": 1}),
    "rotary, grouped, experts, QK-norm": (
        *("query", "1"),
        {"position_embedding_type": "rope", "num_key_value_heads": 1, "mlp_type": "moe", "qk_norm": True},
    ),
    "gated output": ("query", "1", {"output_gate": {"type": "sigmoid"}, **BIASES}),
    "encoder": ("query", "1", {"task": "masked_lm"}),
    "identity blocks, norms": ("block-diagonal", None, {"norm_type": "layernorm"}),
    "single head, norms": ("single-head", None, {"norm_type": "rmsnorm", "num_attention_heads": 1}),
}


def connected(mode: str, streams: int = 3, **fields: Any) -> LeanConfig:
    return small(hyper_connections={"type": "hyper", "streams": streams, "mode": mode}, **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ALL_OF)
def test_exact(case: str, mode: str) -> None:
    remove, layer, fields = ALL_OF[case]
    config = connected(mode, **fields)
    tensors = weights(config)
    result = transform(config, tensors, parse_request(remove, layer))
    fewer = weights_fewer(config, remove, None if layer is None else (int(layer),))
    assert fewer and count_parameters(config).total - count_parameters(result.config).total == fewer
    assert relative(logits(result.config, result.tensors), logits(config, tensors)) <= tolerance(result.conditions)


REFUSED = {
    "queries of all layers": ("query", None, {}, "hyper-connections carry the stream past them"),
    "query and output": ("query,output", "0", {}, "hyper-connections carry the stream past them"),
    "norms": ("query", "1", {"norm_type": "rmsnorm"}, "RMSNorm"),
    "disabled norms": ("query", "1", {"norm_type": "layernorm", "norm_eps": 1e12}, "hyper_connections"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, mode: str) -> None:
    remove, layer, fields, reason = REFUSED[case]
    config = connected(mode, **fields)
    with pytest.raises(LeanError, match=re.escape(reason)):
        transform(config, weights(config), parse_request(remove, layer))


def jacobian(config: LeanConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The derivatives by every tensor of the logits after all texts of three tokens: [logits, elements] each."""
    model = build(config, tensors)
    ids = torch.cartesian_prod(*[torch.arange(config.vocab_size)] * 3)
    slopes = jacrev(lambda given: functional_call(model, given, (ids,)).logits[:, -1], chunk_size=200)(dict(tensors))
    return {name: slope.flatten(0, 1).flatten(1) for name, slope in slopes.items()}


def rank(slopes: Mapping[str, Tensor], without: str) -> int:
    """Of the derivatives by all tensors but those of a pattern, scaled: they differ by orders of magnitude."""
    kept = [slope / slope.norm().clamp(min=1e-12) for name, slope in slopes.items() if not re.search(without, name)]
    values = torch.linalg.svdvals(torch.cat(kept, 1))
    return int((values > 1e-9 * values[0]).sum())


@pytest.mark.parametrize("mode", MODES)
def test_the_streams_have_one_basis(mode: str) -> None:
    """Without one query the function can move in all the directions that it could before. Without both it loses what
    one basis, d^2, and a number in every head, which its key absorbs, leave of 2 d^2 weights; a factor is in both. With
    a basis for each stream nothing would be lost."""
    shape = {"hidden_size": 4, "intermediate_size": 5, "num_attention_heads": 4, "vocab_size": 5}
    config = connected(mode, 2, **shape, position_embedding_type="none", tie_word_embeddings=False)
    slopes = jacobian(config, weights(config))
    every = rank(slopes, "^$")
    assert rank(slopes, r"layers\.0\.self_attn\.q_proj") == rank(slopes, r"layers\.1\.self_attn\.q_proj") == every
    assert rank(slopes, r"self_attn\.q_proj") == every - (2 * 4**2 - (4**2 + 2 * 4 - 1))


@pytest.mark.parametrize("norm", ["none", "layernorm"])
def test_static_mixing_is_redundant(norm: str) -> None:
    """Streams may be replaced by `P_k X` after every sublayer k, with `P_k = P_(k-1) R_k^-1` so that each R_k becomes
    the identity. P_0 has equal row sums, so that the embedding stays in equal copies, and the column sums of all R
    multiplied, so that the mean of the last streams stays."""
    config = connected("static", norm_type=norm, tie_word_embeddings=False)
    before, n = weights(config), 3
    names = [f"model.layers.{i}.{part}_connection" for i in range(2) for part in ("attention", "mlp")]
    after, total = dict(before), torch.eye(n, dtype=torch.float64)
    for name in names:
        total = before[f"{name}.residual"].view(n, n) @ total
    t = total.sum() / n
    change = t * torch.eye(n, dtype=torch.float64) + (total.sum(0) - t).expand(n, n) / n
    for name in ("embed_tokens", "embed_positions"):
        after[f"model.{name}.weight"] = t * before[f"model.{name}.weight"]
    for name in names:
        after[f"{name}.pre"] = torch.linalg.solve(change.T, before[f"{name}.pre"])
        change = torch.linalg.solve(before[f"{name}.residual"].view(n, n).T, change.T).T
        after[f"{name}.post"] = change @ before[f"{name}.post"]
        after[f"{name}.residual"] = torch.eye(n, dtype=torch.float64).flatten()
    assert relative(logits(config, after), logits(config, before)) <= 1e-9
