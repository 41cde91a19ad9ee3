"""What bounds a frontier: the measurements against models whose answer is known."""

from types import SimpleNamespace
from typing import Any

import key_value_sources
import numpy as np
import partial_rope
import torch
from shapes import randomize, tiny, tokens

from leanqkv import LeanForCausalLM

# A share of squares that sums in float32 cannot tell from none.
NOTHING = torch.finfo(torch.float32).eps

# --- benchmarks/key_value_sources.py ----------------------------------------------------------------------------------


def seen_at_random(sequences: int, length: int, lent: Any, keys: Any, rank: int = 8) -> tuple[Any, list[Any]]:
    """A layer of two key heads and four query heads with random patterns and values of a rank, and what it could
    borrow."""
    normal = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=normal)  # noqa: E731
    spread = torch.eye(8) if rank == 8 else draw(rank, 8)
    output, seen, others = draw(16, 12).double(), [], []
    for _ in range(4):
        scores = draw(sequences, 4, length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        values = (draw(sequences, length, rank) @ spread).unflatten(-1, (2, 4)).transpose(1, 2)
        recorder = SimpleNamespace(patterns=scores.softmax(-1), values=values)
        recorder.projected_key = keys(values.transpose(1, 2).flatten(2), draw)
        part = key_value_sources.Seen(recorder, torch.ones(sequences, length), torch.arange(sequences) % 4 == 3)
        recorder.heads = part.attended(values)
        seen.append(part)
        others.append(lent(values, draw))
    return key_value_sources.Layer(seen, output), others


@torch.no_grad()
def test_values_made_of_what_holds_them_miss_nothing() -> None:
    """Keys, or lent heads in another order, that are a linear map of the values; unrelated ones miss something."""
    mix, turn = (torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(n)))[0] for n in (8, 4))
    layer, related = seen_at_random(8, 6, lambda values, _: values.flip(1) @ turn, lambda columns, _: columns @ mix)
    heads = SimpleNamespace(output=layer.output.unflatten(0, (2, 2, 4)).mT)
    unrelated = [torch.randn(8, 2, 6, 4, generator=torch.Generator().manual_seed(9)) for _ in related]
    found = key_value_sources.measure_layer(layer, heads, {"first": unrelated, "below": related}, [2, 4])
    for name in ("only keys", "keys 2", "keys 4", "below", "only below"):
        assert found[name] < NOTHING, name
    assert found["latent 2"] > found["latent 4"] > 0.01 and found["merged"] > 0.01
    assert found["only first"] > found["first"] > 0.01
    assert found["free 4"] <= found["latent 4"] * (1 + 1e-6)


@torch.no_grad()
def test_a_latent_as_wide_as_the_values_rank_misses_nothing() -> None:
    unrelated = lambda columns, draw: draw(*columns.shape)  # noqa: E731
    layer, others = seen_at_random(8, 6, unrelated, unrelated, rank=3)
    heads = SimpleNamespace(output=layer.output.unflatten(0, (2, 2, 4)).mT)
    found = key_value_sources.measure_layer(layer, heads, {"first": others}, [2, 3])
    assert max(found["latent 3"], found["keys 3"], found["free 3"]) < NOTHING < 0.01 < found["latent 2"]


@torch.no_grad()
def test_keys_made_of_what_holds_them_miss_nothing() -> None:
    """Keys of the layer below in other phases and sizes, or in another order; a latent of all columns."""
    torch.manual_seed(0)
    layer, _ = seen_at_random(8, 6, lambda values, _: values, lambda columns, draw: draw(*columns.shape))
    for seen in layer.seen:
        seen.recorder.key, seen.recorder.query = torch.randn(8, 2, 6, 4), torch.randn(8, 4, 6, 4)
    own = [seen.recorder.projected_key for seen in layer.seen]
    heads = [keys.unflatten(-1, (2, 2, 2)) for keys in own]  # [..., heads, parts, frequencies]
    turned = [torch.stack((-one[..., 1, :], one[..., 0, :]), -2).flip(-3).flatten(-3) for one in heads]
    found = key_value_sources.measure_keys(layer, turned, [4, 6, 8])
    assert found["key below"] < NOTHING and abs(found["key latent 8"]) < NOTHING
    assert found["key latent 4"] > found["key latent 6"] > 0.01
    assert key_value_sources.measure_keys(layer, [torch.randn_like(one) for one in own], [])["key below"] > 0.5
    # A frequency without queries does not count.
    for seen in layer.seen:
        seen.recorder.query[..., ::2] = 0
    half = [torch.where(torch.arange(8) % 2 == 1, one, torch.randn_like(one)) for one in own]
    assert key_value_sources.measure_keys(layer, half, [])["key below"] < NOTHING


# --- benchmarks/partial_rope.py ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_frequencies_without_positions_are_those_of_angle_zero() -> None:
    model = randomize(LeanForCausalLM(tiny("llama")), std=0.3).eval()
    ids, rotary = tokens(2, 9), model.model.rotary_emb["rope_parameters"]
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    kept = partial_rope.keep(rotary.inv_freq.expand(layers, heads, -1), 1)
    assert (kept.sum(-1) == 1).all() and kept[..., 0].all()
    whole = model(input_ids=ids).logits
    with partial_rope.positions_kept(torch.ones_like(kept)):
        assert torch.equal(model(input_ids=ids).logits, whole)
    with partial_rope.positions_kept(kept):
        found = model(input_ids=ids).logits
    rotary.inv_freq[1:] = 0
    assert torch.equal(found, model(input_ids=ids).logits) and not torch.equal(found, whole)


def test_every_key_head_keeps_its_own_frequencies() -> None:
    """By loops over the heads; query heads turn as the key head that they read."""
    draw = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 5, 3, generator=draw).double()
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    kept = torch.tensor([[True, False, False], [False, True, True]])
    for number in (2, 6):
        heads = torch.randn(2, number, 5, 6, generator=draw).double()
        found = partial_rope.rotate_kept(heads, partial_rope.Kept(cos, sin, kept))
        for head in range(number):
            own = torch.where(kept[head * 2 // number], angles[0], 0.0)
            first, second = heads[:, head].chunk(2, -1)
            turned = first * own.cos() - second * own.sin(), first * own.sin() + second * own.cos()
            torch.testing.assert_close(found[:, head], torch.cat(turned, -1), rtol=0, atol=1e-15)


@torch.no_grad()
def test_products_are_of_each_key_head() -> None:
    model = randomize(LeanForCausalLM(tiny("llama", "gqa", max_position_embeddings=64)), std=0.3)
    source = SimpleNamespace(config=model.config, tensors=model.state_dict())
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (6, 12))
    found, config = partial_rope.products(source, ids), model.config
    assert found.shape == (config.num_hidden_layers, config.num_key_value_heads, config.head_dim // 2)
    embedded = model.model.layers[0].input_layernorm(model.model.embed_tokens(torch.as_tensor(ids)))
    attention = model.model.layers[0].self_attn
    query, key = (
        projection(embedded).unflatten(-1, (-1, 2, config.head_dim // 2)).norm(dim=-2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    group = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_key_value_heads):
        # Of batches of four sequences, each the product of its means, weighed by its size.
        each = [
            query[rows][:, :, head * group : (head + 1) * group].mean((0, 1, 2)) * key[rows][:, :, head].mean((0, 1))
            for rows in (slice(0, 4), slice(4, 6))
        ]
        torch.testing.assert_close(found[0, head], (4 * each[0] + 2 * each[1]) / 6, rtol=1e-4, atol=1e-6)
