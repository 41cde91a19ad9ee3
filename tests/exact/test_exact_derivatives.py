"""The conditions for an elimination against the derivatives of the model itself, which know no theorem.

A weight can be given any value near its own, and the function stays, if and only if every small change of it can be
made up for by changes of other weights: if the null vectors of the logits' Jacobian take every value on that weight.
Weights are random, and there is more than one head, inside of which a basis is free as well.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from exact_models import build, small, weights
from expected_eliminations import removed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leanqkv import LeanConfig, count_parameters
from leanqkv.model.shapes import parameter_shapes

SKIPLESS = {"attention_skip": False, "mlp_skip": False}
TURNS = {"num_hidden_layers": 4, "num_hidden_groups": 2, "group_order": "turns"}
# Of singular values: those of null vectors are below 1e-14 in these models, all others above 1e-12.
ZERO = 1e-13
SHAPES: dict[str, dict[str, Any]] = {
    "skips": {},
    "skipless": SKIPLESS,
    "skipless parallel": SKIPLESS | {"block_type": "parallel"},
    "one block": {"num_hidden_groups": 1},
    "two blocks in runs": TURNS | {"group_order": "runs"},
    "two blocks in turns": TURNS,
    "two blocks in turns, attention skip": TURNS | {"mlp_skip": False},
    "two blocks in turns, skipless": TURNS | SKIPLESS,
}
REMOVED = ("query", "key", "output", "query,output", "value,output")


def jacobian(config: LeanConfig) -> dict[str, Tensor]:
    """Of random combinations of logits, more than there are weights: [combinations, weights] for every tensor."""
    model = build(config, weights(config))
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    count = count_parameters(config).total
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (math.ceil(count / 20), 6), generator=generator)

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, tensors, kwargs={"input_ids": ids}).logits.flatten()

    with sdpa_kernel(SDPBackend.MATH):
        values, pull_back = torch.func.vjp(logits, tensors)
        combinations = torch.randn(count + 20, len(values), generator=generator, dtype=torch.float64)
        (rows,) = torch.func.vmap(pull_back, chunk_size=128)(combinations)
    return {name: rows[name].flatten(1) for name in parameter_shapes(config)}


@cache
def null_vectors(name: str) -> tuple[LeanConfig, dict[str, Tensor]]:
    """The changes of all tensors that change no logit, orthonormal: [vectors, weights] for every tensor."""
    sizes = {"vocab_size": 7, "hidden_size": 6, "intermediate_size": 8, "max_position_embeddings": 6}
    config = small(**sizes | {"tie_word_embeddings": False} | SHAPES[name])
    rows = jacobian(config)
    together = torch.cat(list(rows.values()), dim=1)
    _, values, vectors = torch.linalg.svd(together / together.norm(dim=0).clamp(min=1e-9))
    rank = int((values > ZERO * values[0]).sum())
    parts = vectors[rank:].split([part.shape[1] for part in rows.values()], dim=1)
    return config, dict(zip(rows, parts, strict=True))


@pytest.mark.parametrize("remove", REMOVED)
@pytest.mark.parametrize("name", SHAPES)
def test_what_can_go(name: str, remove: str) -> None:
    config, vectors = null_vectors(name)
    slots, count = remove.split(","), config.num_hidden_layers
    for layers in (None, *((i,) for i in range(count)), (0, count - 1)):
        blocks = {config.plan.layers[layer].block for layer in layers or range(count)}
        names = [f"model.layers.{block}.self_attn.{slot[0]}_proj.weight" for slot in slots for block in blocks]
        on_them = torch.cat([vectors[name] for name in names], dim=1)
        free = on_them.shape[0] >= on_them.shape[1] and torch.linalg.svdvals(on_them)[-1].item() > 1e-8
        assert free == (removed(config, slots, layers) is not None), layers


def test_of_two_layers_in_turns_one_query_goes() -> None:
    """P1 section 2 names a repeated block of two layers as a case of its Theorem 4.3, which removes every layer's."""
    config, _ = null_vectors("two blocks in turns")
    assert [layer.block for layer in config.plan.layers] == [0, 1, 0, 1]
    assert removed(config, ["query"], [0]) == removed(config, ["query"], [0, 2]) == [("query", 0)]
    assert removed(config, ["query"], None) is None
    assert removed(null_vectors("one block")[0], ["query"], None) == [("query", 0)]
