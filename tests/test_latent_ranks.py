"""Latents before any weight is made: approximations, Gram matrices and ranks against loops and other optimizers."""

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from converting import BIASES, build, source
from reducing import SMALL, Model, normals, sample_of, seen_by_hooks, sweeping
from safetensors.torch import load_file
from scipy.optimize import minimize
from shapes import assert_near, tiny
from torch import Tensor

from leanqkv import LeanConfig, LeanError
from leanqkv.convert import latent_values, low_rank
from leanqkv.convert.heads import split_heads
from leanqkv.convert.latent_values import (
    NOTHING,
    ValueGram,
    choose_ranks,
    step_of,
    value_gains,
    value_latents,
    value_width,
)
from leanqkv.convert.latents import Latents
from leanqkv.convert.low_rank import LARGE, approximate

# --- the best approximation of every rank -----------------------------------------------------------------------------


def lost(values: Tensor, output: Tensor, combine: Tensor, restore: Tensor) -> Tensor:
    """The explicit error of a latent."""
    return ((values - values @ combine @ restore) @ output).square().sum()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_no_other_latent_loses_less(rank: int) -> None:
    width, normal = 4, normals(rank)
    values, output = normal(30, width) @ normal(width, width), normal(width, 6)
    combine, restore, gains = approximate(values.T @ values, output @ output.T)
    assert combine.shape == restore.shape == (width, width)
    least = float(lost(values, output, combine[:, :rank], restore[:rank]))
    assert float(gains[rank:].sum()) == pytest.approx(least, rel=1e-9)

    def of_flat(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parts = torch.from_numpy(flat).requires_grad_()
        first, second = parts.view(2, -1)
        value = lost(values, output, first.view(width, rank), second.view(rank, width))
        return float(value.detach()), torch.autograd.grad(value, parts)[0].numpy()

    starts = (normal(2 * width * rank).numpy() for _ in range(5))
    found = [minimize(of_flat, start, jac=True, tol=1e-12).fun for start in starts]
    assert min(found) == pytest.approx(least, rel=1e-6)
    assert all(value >= least * (1 - 1e-9) for value in found)


DEGENERATE = {
    "fewer directions of values than columns": lambda normal: (normal(40, 2) @ normal(2, 6), normal(6, 5)),
    "fewer tokens than columns": lambda normal: (normal(3, 6), normal(6, 9)),
    "fewer outputs than columns": lambda normal: (normal(40, 6), normal(6, 2)),
    "fewer of both": lambda normal: (normal(40, 3) @ normal(3, 6), normal(6, 2)),
    "columns of zeros": lambda normal: (normal(40, 6) * torch.tensor([1, 0, 1, 1, 0, 1]), normal(6, 9)),
    "a head without output weights": lambda normal: (
        normal(40, 6),
        normal(6, 9) * torch.tensor([[1.0]] * 3 + [[0]] * 3),
    ),
    "one direction": lambda normal: (normal(40, 1) @ normal(1, 6), normal(6, 1) @ normal(1, 5)),
    "the same columns": lambda normal: (normal(40, 3).repeat(1, 2), normal(6, 9)),
    "of far different sizes": lambda normal: (normal(40, 6) * 10.0 ** -torch.arange(6), normal(6, 9)),
    "tiny": lambda normal: (1e-150 * normal(40, 6), normal(6, 9)),
    "no values": lambda normal: (torch.zeros(40, 6), normal(6, 9)),
    "no output weights": lambda normal: (normal(40, 6), torch.zeros(6, 9)),
    "nothing": lambda normal: (torch.zeros(40, 6), torch.zeros(6, 9)),
}


@pytest.mark.parametrize("name", ["of full rank", *DEGENERATE])
def test_gains_are_what_every_rank_loses(name: str) -> None:
    """All ranks, the rank of the problem included, whatever values and output weights there are."""
    normal = normals()
    make = DEGENERATE.get(name, lambda normal: (normal(40, 6), normal(6, 9)))
    values, output = (matrix.double() for matrix in make(normal))
    combine, restore, gains = approximate(values.T @ values, output @ output.T)
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float64 for tensor in (combine, restore, gains))
    assert (gains >= 0).all() and (gains.diff() <= 0).all()
    size = float((values @ output).square().sum())
    assert float(gains.sum()) == pytest.approx(size, rel=1e-9)
    singular = torch.linalg.svdvals(values @ output)
    for rank in range(7):
        expected = float(singular[rank:].square().sum())
        # Directions smaller than 1e-9 of the largest are left alone, in values and in output weights.
        rounding = 1e-8 * size
        assert float(gains[rank:].sum()) == pytest.approx(expected, rel=1e-9, abs=rounding)
        assert float(lost(values, output, combine[:, :rank], restore[:rank])) == pytest.approx(expected, abs=rounding)


@pytest.mark.parametrize("complex_columns", [False, True])
def test_a_few_columns_of_a_wide_matrix(complex_columns: bool) -> None:
    """Found without all others, they leave as much as the best ones do."""
    normal, width, rank = normals(), LARGE, 16
    values = normal(2 * rank, width) @ normal(width, width) / width**0.5
    values = values.repeat(width // len(values), 1) + 0.02 * normal(width, width)
    values = torch.complex(values, normal(width, width) * 0.01) if complex_columns else values
    output = normal(width, 24).to(values) + 0.1 * torch.eye(width)[:, :24].to(values)
    output = torch.cat((output, torch.eye(width).to(values)), dim=1)
    combine, restore, gains = approximate(values.mH @ values, output @ output.mH, rank)
    assert combine.shape == (width, rank) and restore.shape == (rank, width)
    squares = torch.linalg.eigvalsh(output.mH @ (values.mH @ values) @ output).flip(0)
    assert_near(gains, squares[:rank], 1e-3)
    left = ((values - values @ combine @ restore) @ output).abs().square().sum()
    assert float(left) == pytest.approx(float(squares[rank:].sum()), rel=1e-3)


# --- Gram matrices of attended values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("key_width", [0, 4])
def test_the_gram_matrix_of_attended_values(group: int, biased: bool, key_width: int) -> None:
    """Of all heads' values and then the keys, side by side, under every query head's patterns; a value bias does not
    count."""
    normal, heads, width, length = normals(), 2, 3, 4
    bias = normal(heads, width) if biased else None
    found = ValueGram(heads * width, None if bias is None else bias.flatten(), key_width)
    columns = heads * width + key_width
    expected = torch.zeros(columns, columns, dtype=torch.float64)
    for batch in (2, 1):
        patterns, weight = normal(batch, heads * group, length, length).softmax(-1), normal(batch, length).exp()
        values, keys = normal(batch, heads, length, width), normal(batch, length, key_width)
        seen = values if bias is None else values + bias[:, None]
        found.add(SimpleNamespace(values=seen, patterns=patterns, projected_key=keys), weight)
        for b, query, t in np.ndindex(batch, heads * group, length):
            parts = [*values[b], keys[b]]
            row = torch.cat([sum(patterns[b, query, t, s] * part[s] for s in range(length)) for part in parts])
            expected += weight[b, t] ** 2 * torch.outer(row, row)
    assert found.total.dtype == torch.float64
    assert_near(found.total, expected, 1e-13)


@pytest.mark.parametrize("key_bias", [False, True])
@pytest.mark.parametrize("signs", [False, True])
def test_the_gram_matrix_of_the_inputs(key_bias: bool, signs: bool) -> None:
    """Keys and values made of it have the Gram matrix that is summed up of keys and values, for the same signs."""
    normal, heads, width, length, hidden = normals(), 2, 3, 4, 5
    columns = heads * width
    value, key, bias = normal(columns, hidden), normal(4, hidden + key_bias), normal(columns)
    inputs = normal(2, length, hidden)
    with_ones = torch.cat((inputs, torch.ones(2, length, 1)), dim=-1) if key_bias else inputs
    recorder = SimpleNamespace(
        inputs=inputs,
        values=(inputs @ value.T + bias).unflatten(-1, (heads, width)).transpose(1, 2),
        patterns=normal(2, 4, length, length).softmax(-1),
        projected_key=with_ones @ key.T,
    )
    found = []
    for inputs in (0, hidden + key_bias):
        generator = torch.Generator().manual_seed(3) if signs else None
        found.append(ValueGram(columns, bias, 4, inputs, generator))
        found[-1].add(recorder, normals(2)(2, length).exp())
    rows = torch.cat((torch.nn.functional.pad(value, (0, int(key_bias))), key))
    assert_near(rows @ found[1].total @ rows.T, found[0].total, 1e-12)


def test_random_signs_are_exact_on_average() -> None:
    """Over many draws the mean of the Gram matrix is the one of all heads, and its error is the one that the docstring
    of ValueGram names: of a token, and of all."""
    normal, heads, queries, width, length, draws = normals(), 2, 6, 3, 5, 4000
    recorder = SimpleNamespace(
        values=normal(2, heads, length, width), patterns=normal(2, queries, length, length).softmax(-1)
    )
    weight = normal(2, length).exp()
    exact = ValueGram(heads * width, None)
    exact.add(recorder, weight)
    columns, expected = recorder.values.transpose(1, 2).flatten(2), 0.0
    for b, t in np.ndindex(2, length):
        rows = weight[b, t] * recorder.patterns[b, :, t] @ columns[b]  # [queries, columns]
        of_token = rows.T @ rows
        expected += float(of_token.trace() ** 2 + of_token.square().sum() - 2 * rows.square().sum(1).square().sum())
    generator, errors = torch.Generator().manual_seed(1), []
    for _ in range(draws):
        signs = ValueGram(heads * width, None, generator=generator)
        signs.add(recorder, weight)
        errors.append(signs.total - exact.total)
    squares = torch.stack(errors).square().sum((1, 2))
    assert float(squares.mean()) == pytest.approx(expected, rel=4 * float(squares.std()) / expected / draws**0.5)
    assert float(torch.stack(errors).mean(0).square().sum()) < 9 * expected / draws


def keys_by_hooks(model: Model, sample: np.ndarray) -> dict[int, Tensor]:
    """The keys of every layer as they are projected."""
    reference, keys = build(*model), {}
    for i, layer in enumerate(reference.model.layers):
        layer.self_attn.k_proj.register_forward_hook(lambda m, x, y, i=i: keys.update({i: y}))
    reference(torch.from_numpy(sample))
    return keys


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "shape, fields",
    [
        ("llama", {"num_key_value_heads": 2}),
        ("gpt", BIASES | {"num_attention_heads": 6, "num_key_value_heads": 2}),
        ("llama", {"sliding_window": 3, "window_layers": [1], "num_attention_heads": 2, "attention_bias": True}),
    ],
)
@torch.no_grad()
def test_the_gains_are_what_latents_lose(shape: str, fields: dict, separate: bool, tmp_path: Path) -> None:
    """In every layer and for every rank, from the model's own patterns: every head's values under all of them, and what
    is made of the keys where these may be read."""
    model = source(shape, **SMALL | fields)
    config, sample = model[0], sample_of(model[0], 16, 6)
    streams, values, patterns = seen_by_hooks(model, sample)
    keys = keys_by_hooks(model, sample)
    chosen = Latents(*model, 0.9, keys=False, separate=separate, exact=True)
    sweeps = sweeping(model, sample, tmp_path, [chosen], batch_size=3)
    sweeps.run()
    assert chosen.from_keys == [not separate and layer.window is None for layer in config.plan.layers]
    width, columns, queries = config.head_dim, value_width(config), config.num_attention_heads
    group = queries // config.num_key_value_heads
    for i in range(config.num_hidden_layers):
        stored = load_file(sweeps._file(chosen.measures, i))
        gram = stored["gram"]
        if chosen._inputs(i):  # of the inputs, where keys and values have more columns
            name, rows = f"model.layers.{i}.self_attn", torch.zeros(2 * columns, len(gram)).double()
            rows[:columns, : config.hidden_size] = model[1][f"{name}.v_proj.weight"]
            rows[columns:, : config.hidden_size] = model[1][f"{name}.k_proj.weight"]
            if len(gram) > config.hidden_size:
                rows[columns:, config.hidden_size] = model[1][f"{name}.k_proj.bias"]
            rows = rows if chosen.from_keys[i] else rows[:columns]
            gram = rows @ gram @ rows.T
        latents = value_latents(gram, split_heads(*model, i).output.mT)
        of_values = value_latents(gram[:columns, :columns], split_heads(*model, i).output.mT)
        whole = float(of_values.gains.sum()) / sample.size
        by_keys = keys[i] @ latents.from_keys if chosen.from_keys[i] else 0.0
        bias = model[1].get(f"model.layers.{i}.self_attn.v_proj.bias", 0.0)
        output = model[1][f"model.layers.{i}.self_attn.o_proj.weight"].split(width, dim=1)
        weight = (streams[i].square().mean(-1) + config.norm_eps).rsqrt()[..., None]
        for rank in (0, 1, columns // 2, columns - 1, columns):
            rest = values[i] - bias - by_keys
            left = rest - rest @ latents.combine[:, :rank] @ latents.restore[:rank]
            error = 0.0
            for query, pattern in product(range(queries), repeat=2):
                head = query // group
                row = patterns[i][:, pattern] @ left[..., head * width : (head + 1) * width] @ output[query].T
                error += float((row * weight).square().sum())
            found = float(stored["gains"][rank:].sum())
            assert found == pytest.approx(error / sample.size, rel=1e-4, abs=1e-6 * whole)


@pytest.mark.parametrize("share, even", [(0.0, True), (0.5, True), (2.0, False)])
def test_values_that_the_keys_hold(share: float, even: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where next to nothing is left behind the first columns, the others are not told apart; their sum is the same."""
    monkeypatch.setattr(latent_values, "LARGE", 8)
    monkeypatch.setattr(low_rank, "LARGE", 8)
    normal, width, heads = normals(), 24, 3
    keys, output = normal(200, width), normal(heads, 2, width // heads, 9)
    weight = torch.block_diag(*torch.einsum("hgkd,hgld->hkl", output, output))
    values, rest = keys @ normal(width, width), normal(200, width)
    values = values + 0.1 * normal(200, 2) @ normal(2, width)
    whole, left = (float(((matrix.T @ matrix) * weight).sum()) for matrix in (values, rest))
    values = values + rest * (share * NOTHING * whole / left) ** 0.5
    both = torch.cat((values, keys), dim=1)
    gains, expected = value_gains(both.T @ both, output), value_latents(both.T @ both, output).gains
    assert float(gains.sum()) == pytest.approx(float(expected.sum()), rel=1e-6, abs=1e-9 * whole)
    assert_near(gains[:3], expected[:3], 1e-6 if even else 1e-12)
    assert (gains[3:].max() == gains[3:].min()) == even
    if not even:
        assert_near(gains, expected, 1e-12)


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "width, cut",
    [
        (32, [True, True, True]),
        (32, [True, False, True]),
        (16, [True] * 5),
        (5, [True, True, True]),
        (12, [False, True, True]),
        (8, [True, True, False]),
    ],
)
def test_no_other_ranks_take_away_more(width: int, cut: list[bool]) -> None:
    """Of all allocations to so many columns."""
    step = {32: 8, 16: 8, 12: 2, 8: 2, 5: 1}[width]
    assert step_of(width) == step
    choices = [range(step, width + 1, step) if may else [width] for may in cut]
    allocations = np.array(list(product(*choices)))
    for seed in range(6):
        gains = normals(seed)(len(cut), width).square() * normals(seed + 50)(len(cut), 1).exp()
        gains = gains.sort(dim=1, descending=True).values
        below = torch.cat((torch.zeros(len(cut), 1), gains.cumsum(1)), dim=1)
        taken = sum(below[layer].numpy()[allocations[:, layer]] for layer in range(len(cut)))
        sizes = allocations.sum(1)
        for columns in range(sizes.min(), sizes.max() + 1):
            ranks = choose_ranks(gains, columns, cut, [1] * len(cut))
            assert [rank in allowed for rank, allowed in zip(ranks, choices, strict=True)] == [True] * len(cut)
            assert sum(ranks) <= columns
            found = sum(float(below[layer, rank]) for layer, rank in enumerate(ranks))
            assert found == pytest.approx(taken[sizes <= columns].max(), rel=1e-12)


def test_ranks_where_columns_are_worth_nothing() -> None:
    """Ties, zeros among them, and a layer that is worth far less still has some columns."""
    zeros = torch.zeros(3, 16).double()
    assert sorted(choose_ranks(zeros, 40, [True] * 3, [1] * 3)) == [8, 16, 16]
    zeros[0] = 1e12
    assert choose_ranks(zeros, 32, [True] * 3, [1] * 3) == [16, 8, 8]


BUDGETS: dict[str, tuple[LeanConfig, tuple[int, ...] | None]] = {
    "mha": (tiny("gpt"), None),
    "some layers": (tiny("gpt", num_hidden_layers=5, **SMALL), (3,)),
    "layers twice": (tiny("llama"), (0, 2, 2)),
    "gqa": (tiny("llama", "gqa"), None),
    "mqa": (tiny("llama", "mqa"), None),
    "heads of 6": (tiny("llama", head_dim=6), None),
    "heads of 5": (tiny("gpt", head_dim=5, num_attention_heads=3), (1, 2)),
    "identity key": (tiny("llama", "identity-key"), None),
    "windows": (tiny("llama", sliding_window=4, window_layers=[0, 2]), None),
}


def with_ranks(
    config: LeanConfig,
    share: float,
    layers: tuple[int, ...] | None,
    tensors: Any = None,
    keys: bool = False,
    at_context: int | None = None,
) -> Latents:
    """After a choice from random gains."""
    made, normal = Latents(config, tensors or {}, share, layers, keys, at_context=at_context), normals()
    gains = [normal(made.width).square().sort(descending=True).values for _ in range(config.num_hidden_layers)]
    heads, frequencies = config.num_key_value_heads, config.head_dim // 2
    of_keys = [normal(frequencies, heads).square().sort(descending=True).values for _ in gains]
    if config.position_embedding_type != "rope":
        of_keys = [normal(made.width).square().sort(descending=True).values for _ in gains]
    made.choose(lambda layer: {"gains": gains[layer], "keys.gains": of_keys[layer]})
    return made


def smallest_share(config: LeanConfig, layers: tuple[int, ...] | None, keys: bool) -> float:
    """As a refusal names it, in percent."""
    with pytest.raises(LeanError, match="out of reach") as refusal:
        Latents(config, {}, 0.001, layers, keys)
    return float(re.search(r"from ([\d.]+)% of its cache up", str(refusal.value))[1])


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_cache_keeps_to_its_share(name: str, keys: bool) -> None:
    """Measured on the configuration of the result, and so closely that no layer could have a step more."""
    config, layers = BUDGETS[name]
    whole, width = config.plan.kv_bytes_per_token(torch.bfloat16), value_width(config)
    step, least = step_of(width), smallest_share(config, layers, keys)
    for share in (*np.linspace(least / 100, 0.999, 40), 0.75, 0.8, 0.84, 0.9):
        if share < least / 100:
            continue
        made = with_ranks(config, float(share), layers, keys=keys)
        taken = made.target.plan.kv_bytes_per_token(torch.bfloat16)
        assert taken <= share * whole * (1 + 1e-9) and taken < whole
        assert taken + 2 * step > share * whole * (1 - 1e-9)
        for side, ranks, may in (("value", made.ranks, made.cut), ("key", made.key_ranks, made.key_cut)):
            assert all(rank % step == 0 and 1 <= rank <= width for rank in ranks)
            assert all(ranks[layer] == width for layer in range(len(ranks)) if not may[layer])
            kinds = [getattr(layer, side).kind == "latent" for layer in made.target.plan.layers]
            assert kinds == [rank < width for rank in ranks]
        pairs = zip(made.ranks, made.key_ranks, strict=True)
        assert made.first == [min(pair) < width for pair in pairs].index(True)
        assert [layer.value_rank for layer in made.target.plan.layers] == [
            None if rank == width else rank for rank in made.ranks
        ]
        assert any(made.key_cut) == (keys and name != "identity key")


def test_a_share_of_whole_columns_is_not_rounded_away() -> None:
    """57% of 100 columns are 57, and 0.57 * 100 is less."""
    config = tiny("gpt", num_hidden_layers=5, num_attention_heads=2, head_dim=5)
    for percent in range(60, 100):
        assert Latents(config, {}, percent / 100, keys=False).budget == percent


@pytest.mark.parametrize("context", [1, 3, 4, 12, 32])
def test_a_share_at_a_context(context: int) -> None:
    """Measured on the cache that the result keeps of so many tokens; no layer could have a step more."""
    config, layers = BUDGETS["windows"]
    whole, step = config.plan.kv_bytes(context, torch.bfloat16), step_of(value_width(config))
    for share in np.linspace(0.55, 0.99, 30):
        made = with_ranks(config, float(share), layers, keys=True, at_context=context)
        taken = made.target.plan.kv_bytes(context, torch.bfloat16)
        assert taken <= share * whole * (1 + 1e-9) and taken < whole
        ranks = [*zip(made.ranks, made.key_ranks, strict=True)]
        kept = [min(context, 3) if layer.window else context for layer in made.target.plan.layers]
        more = min(cost for cost, pair in zip(kept, ranks, strict=True) if min(pair) < made.width)
        assert taken + 2 * step * more > share * whole * (1 - 1e-9)
        if context <= 3:  # every window holds it
            plain = with_ranks(config, float(share), layers, keys=True)
            assert ranks == [*zip(plain.ranks, plain.key_ranks, strict=True)]


def test_columns_that_a_window_lets_go_cost_less() -> None:
    """Of layers with the same gains the one with a window has more columns."""
    gains = torch.ones(2, 32).cumsum(1).flip(1).double()
    assert choose_ranks(gains, 48, [True] * 2, [1, 1]) == [24, 24]
    assert choose_ranks(gains, 4 * 16 + 24, [True] * 2, [4, 1]) == [16, 24]


@pytest.mark.parametrize("context", [0, -1, 33])
def test_a_context_that_the_model_does_not_have(context: int) -> None:
    config = tiny("llama", sliding_window=4, max_position_embeddings=32)
    with pytest.raises(LeanError, match=f"`at_context` must be from 1 to 32, the positions .*, found {context}$"):
        Latents(config, {}, 0.84, at_context=context)


def test_the_layers_without_a_window_alone_may_exceed_a_share() -> None:
    """Where only layers with windows may be cut, a long context leaves next to nothing to save."""
    config = tiny("llama", sliding_window=4, window_layers=[0])
    assert Latents(config, {}, 0.84, (0,), at_context=4).costs[0] == 3
    with pytest.raises(LeanError, match="of its cache up to all of it at 32 tokens; `cache=84%` is out of reach"):
        Latents(config, {}, 0.84, (0,), at_context=32)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_smallest_share_that_is_named_can_be_had(name: str, keys: bool) -> None:
    config, layers = BUDGETS[name]
    named = smallest_share(config, layers, keys)
    made, step = with_ranks(config, named / 100, layers, keys=keys), step_of(value_width(config))
    cut = [layer for layer in range(config.num_hidden_layers) if layers is None or layer in layers]
    assert all(made.ranks[layer] == step for layer in cut)
    assert all(rank == step for rank, may in zip(made.key_ranks, made.key_cut, strict=True) if may)
    with pytest.raises(LeanError, match=f"from {named:g}% of its cache .* `cache={named - 0.1:g}%` is out of reach"):
        Latents(config, {}, round(named - 0.1, 1) / 100, layers, keys)


@pytest.mark.parametrize("factor, keys_stay", [(0.2, True), (0.05, False)])
def test_an_error_of_the_keys_counts_ten_times(factor: float, keys_stay: bool) -> None:
    """Where a column of keys takes away a fifth of what one of values does, keys are kept; of a twentieth, values."""
    config = tiny("gpt")
    made = Latents(config, {}, 0.625)
    gains = torch.ones(made.width, dtype=torch.float64)
    made.choose(lambda layer: {"gains": gains, "keys.gains": factor * gains})
    whole, least = [made.width] * config.num_hidden_layers, [step_of(made.width)] * config.num_hidden_layers
    assert (made.key_ranks, made.ranks) == ((whole, least) if keys_stay else (least, whole))
