"""The conditions for an elimination against the derivatives of the model itself, which know no theorem.

A weight can be given any value near its own, and the function stays, if and only if every small change of it can be
made up for by changes of other weights: if the null vectors of the logits' Jacobian take every value on that weight.
Weights are random, and there is more than one head, inside of which a basis is free as well.
"""

import math
from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
import torch
from exact_models import build, small, weights
from expected_eliminations import identity_blocks, removed, stays_tied
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leanqkv import LeanConfig
from leanqkv.model.shapes import count_parameters, parameter_shapes

SKIPLESS = {"attention_skip": False, "mlp_skip": False}
# Of singular values: those of null vectors are below 1e-14 in these models, all others above 1e-12.
ZERO = 1e-13
SHAPES: dict[str, dict[str, Any]] = {
    "skips": {},
    "attention skip": {"mlp_skip": False},
    "attention skip, tied": {"mlp_skip": False, "tie_word_embeddings": True},
    "MLP skip": {"attention_skip": False},
    "skipless": SKIPLESS,
    "skipless, tied": SKIPLESS | {"tie_word_embeddings": True},
    "parallel": {"block_type": "parallel"},
    "skipless parallel": SKIPLESS | {"block_type": "parallel"},
    "one block": SKIPLESS | {"num_hidden_groups": 1},
    "one block, skips, tied": {"num_hidden_groups": 1, "tie_word_embeddings": True},
    "RMSNorm": SKIPLESS | {"norm_type": "rmsnorm"},
    "LayerNorm": {"norm_type": "layernorm", "mlp_skip": False},
    "average": SKIPLESS | {"num_hidden_layers": 3, "depth_average": {"dilation": 2, "period": 1}},
    "first values": {"key_value": {"type": "first_layer_values", "ratio": 0.34}, "attention_skip": False},
    "borrowed values": SKIPLESS | {"key_value": {"type": "borrowed_values", "heads": [[1, 0, 0, 2], [1, 2, 1, 1]]}},
    "shared keys": SKIPLESS | {"key_value": {"type": "shared_middle", "keys": True}},
    "grouped": SKIPLESS | {"num_key_value_heads": 1},
    "an identity": SKIPLESS | {"query": [{"type": "identity", "layers": [1]}]},
    "rotary, QK-norm": {"position_embedding_type": "rope", "qk_norm": True, "mlp_skip": False},
}
REMOVED = ("query", "key", "output", "query,output", "query,value", "value,output")


def shape(**fields: Any) -> LeanConfig:
    sizes = {"vocab_size": 7, "hidden_size": 6, "intermediate_size": 8, "max_position_embeddings": 6}
    return small(**sizes | {"num_attention_heads": 3, "tie_word_embeddings": False} | fields)


def jacobian(config: LeanConfig) -> dict[str, Tensor]:
    """Of random combinations of logits, more than there are weights: [combinations, weights] for every tensor."""
    model = build(config, weights(config))
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    count = count_parameters(config).total
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (math.ceil(count / 20), 6), generator=generator)

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        if config.tie_word_embeddings:
            tensors = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        return torch.func.functional_call(model, tensors, kwargs={"input_ids": ids}).logits.flatten()

    with sdpa_kernel(SDPBackend.MATH):
        values, pull_back = torch.func.vjp(logits, tensors)
        combinations = torch.randn(count + 20, len(values), generator=generator, dtype=torch.float64)
        (rows,) = torch.func.vmap(pull_back, chunk_size=128)(combinations)
    return {name: rows[name].flatten(1) for name in parameter_shapes(config)}


def null_vectors(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The changes of all these tensors that change no logit, orthonormal: [vectors, weights] for every tensor."""
    together = torch.cat(list(rows.values()), dim=1)
    together = together / together.norm(dim=0).clamp(min=1e-9)
    _, values, vectors = torch.linalg.svd(together)
    rank = int((values > ZERO * values[0]).sum())
    parts = vectors[rank:].split([part.shape[1] for part in rows.values()], dim=1)
    return dict(zip(rows, parts, strict=True))


@cache
def changes(name: str) -> tuple[LeanConfig, dict[str, Tensor]]:
    config = shape(**SHAPES[name])
    return config, null_vectors(jacobian(config))


def can_be_made_up_for(vectors: dict[str, Tensor], names: Collection[str]) -> bool:
    """Whether the null vectors take every value on these tensors."""
    on_them = torch.cat([vectors[name] for name in names], dim=1)
    return on_them.shape[0] >= on_them.shape[1] and torch.linalg.svdvals(on_them)[-1].item() > 1e-8


@pytest.mark.parametrize("remove", REMOVED)
@pytest.mark.parametrize("name", SHAPES)
def test_what_can_go(name: str, remove: str) -> None:
    config, vectors = changes(name)
    slots, count = remove.split(","), config.num_hidden_layers
    for layers in (None, *((i,) for i in range(count)), (0, count - 1)):
        chosen = range(count) if layers is None else layers
        blocks = {config.plan.layers[layer].block for layer in chosen}
        names = {f"model.layers.{block}.self_attn.{slot[0]}_proj.weight" for slot in slots for block in blocks}
        if any(name not in vectors or vectors[name].shape[1] != config.hidden_size**2 for name in names):
            assert removed(config, slots, layers) is None, layers  # one of them is not there, or not square
            continue
        expected = removed(config, slots, layers) is not None
        if config.tie_word_embeddings:
            expected = expected and stays_tied(config, slots, layers)
        assert can_be_made_up_for(vectors, names) == expected, layers


BLOCKS: dict[str, dict[str, Any]] = {
    "LayerNorm": {"norm_type": "layernorm"},
    "grouped": {"num_key_value_heads": 1},
    "QK-norm": {"qk_norm": True},
    "first values": {"key_value": {"type": "first_layer_values", "ratio": 0.34}},
    "mixed values": {"key_value": {"type": "interpolated_values"}},
    "borrowed values": {"key_value": {"type": "borrowed_values", "heads": [[0, 2, 0, 0], [1, 0, 0, 1], [1, 2, 1, 1]]}},
    "borrowed values, one block": {
        "num_hidden_groups": 1,
        "key_value": {"type": "borrowed_values", "heads": [[0, 2, 0, 0], [1, 2, 0, 0]]},
    },
    "shared values": {"key_value": {"type": "shared_adjacent"}},
    "one block": {"num_hidden_groups": 1},
    "an identity": {"output": [{"type": "identity", "layers": [1]}]},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_identity_blocks(name: str) -> None:
    """The null vectors of W_V and W_O, or W_Q and W_K, alone take as many values on a window as numbers are saved."""
    config = shape(**{"norm_type": "rmsnorm"} | BLOCKS[name])
    rows = jacobian(config)
    expected = identity_blocks(config) or {}
    for side, pair in (("value", "vo"), ("key", "qk")):
        if side == "key" and config.qk_norm:
            continue  # the norm makes up for a change of the whole head's size
        projections = tuple(f"self_attn.{projection}_proj.weight" for projection in pair)
        vectors = null_vectors({tensor: part for tensor, part in rows.items() if tensor.endswith(projections)})
        windows = [
            part.unflatten(1, (-1, config.head_dim, 6))[..., : config.head_dim].flatten(1)
            for tensor, part in vectors.items()
            if f"{side[0]}_proj" in tensor
        ]
        rank = torch.linalg.matrix_rank(torch.cat(windows, dim=1), atol=1e-8).item()
        assert rank == sum(saved for (of, _), saved in expected.items() if of == side), side
