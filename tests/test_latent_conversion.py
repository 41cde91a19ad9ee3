"""Conversion to latent values: every sum, rank and budget against loops and other optimizers, and as a whole."""

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from converting import BIASES, build, logits, source
from reducing import EPS, SMALL, SOURCES, Model, assert_same, normals, sample_of, seen_by_hooks, sweeping, to_latents
from safetensors.torch import load_file
from scipy.optimize import minimize
from shapes import assert_near, tiny, tokens
from torch import Tensor

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.convert.heads import split_heads
from leanqkv.convert.latent_values import ValueGram, choose_ranks, step_of, value_latents, value_width
from leanqkv.convert.latents import Latents
from leanqkv.convert.low_rank import approximate
from leanqkv.inference import Decoder

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
    chosen = Latents(*model, 0.9, keys=False, separate=separate)
    sweeps = sweeping(model, sample, tmp_path, [chosen], batch_size=3)
    sweeps.run()
    assert chosen.from_keys == [not separate and layer.window is None for layer in config.plan.layers]
    width, columns, queries = config.head_dim, value_width(config), config.num_attention_heads
    group = queries // config.num_key_value_heads
    for i in range(config.num_hidden_layers):
        stored = load_file(sweeps._file(chosen.measures, i))
        latents = value_latents(stored["gram"], split_heads(*model, i).output.mT)
        of_values = value_latents(stored["gram"][:columns, :columns], split_heads(*model, i).output.mT)
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
            ranks = choose_ranks(gains, columns, cut)
            assert [rank in allowed for rank, allowed in zip(ranks, choices, strict=True)] == [True] * len(cut)
            assert sum(ranks) <= columns
            found = sum(float(below[layer, rank]) for layer, rank in enumerate(ranks))
            assert found == pytest.approx(taken[sizes <= columns].max(), rel=1e-12)


def test_ranks_where_columns_are_worth_nothing() -> None:
    """Ties, zeros among them, and a layer that is worth far less still has some columns."""
    zeros = torch.zeros(3, 16).double()
    assert sorted(choose_ranks(zeros, 40, [True] * 3)) == [8, 16, 16]
    zeros[0] = 1e12
    assert choose_ranks(zeros, 32, [True] * 3) == [16, 8, 8]


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
    config: LeanConfig, share: float, layers: tuple[int, ...] | None, tensors: Any = None, keys: bool = False
) -> Latents:
    """After a choice from random gains."""
    made, normal = Latents(config, tensors or {}, share, layers, keys), normals()
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
        assert Latents(config, {}, percent / 100, keys=False).columns == percent


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_smallest_share_that_is_named_can_be_had(name: str, keys: bool) -> None:
    config, layers = BUDGETS[name]
    named = smallest_share(config, layers, keys)
    made, step = with_ranks(config, named / 100, layers, keys=keys), step_of(value_width(config))
    cut = [layer for layer in range(config.num_hidden_layers) if layers is None or layer in layers]
    assert all(made.ranks[layer] == step for layer in cut)
    assert all(rank == step for rank, may in zip(made.key_ranks, made.key_cut, strict=True) if may)
    with pytest.raises(LeanError, match=f"from {named:g}% of its cache .* {named - 0.1:g}% is out of reach"):
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


# --- a layer's heads --------------------------------------------------------------------------------------------------


def positive(normal: Any, size: int) -> Tensor:
    root = normal(size, 2 * size)
    return root @ root.T


@pytest.mark.parametrize("key_rank", [None, 6])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_no_other_values_from_keys_lose_less(rank: int, key_rank: int | None) -> None:
    """Whatever is made of the keys, or of some combinations of them, and of a latent."""
    normal, width = normals(rank), 6
    values, keys, output = normal(60, width), normal(60, 8), normal(1, 1, width, 9)
    values = values + keys @ normal(8, width)
    held = keys if key_rank is None else keys @ (chosen := normal(8, key_rank))
    both = torch.cat((values, keys), dim=1)
    found = value_latents(both.T @ both, output, None if key_rank is None else chosen)

    def lost(from_keys: Tensor, combine: Tensor, restore: Tensor) -> Tensor:
        rest = values - held @ from_keys
        return ((rest - rest @ combine @ restore) @ output[0, 0]).square().sum()

    least = float(lost(found.from_keys, found.combine[:, :rank], found.restore[:rank]))
    assert float(found.gains[rank:].sum()) == pytest.approx(least, rel=1e-8)
    shapes = [(held.shape[1], width), (width, rank), (rank, width)]

    def of_flat(flat: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(flat).requires_grad_()
        parts = leaf.split([rows * columns for rows, columns in shapes])
        value = lost(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))
        return float(value.detach()), torch.autograd.grad(value, leaf)[0].numpy()

    sizes = sum(rows * columns for rows, columns in shapes)
    others = [minimize(of_flat, normal(sizes).numpy(), jac=True, tol=1e-12).fun for _ in range(5)]
    # The regression on the keys is pulled a little towards none.
    assert least * (1 - 1e-2) <= min(others) and least <= min(others) * (1 + 1e-3)


@pytest.mark.parametrize("reads", ["nothing", "keys", "latent keys"])
@pytest.mark.parametrize("fields", [{}, BIASES, {"attention_bias": True, "num_key_value_heads": 2}])
def test_latent_heads(fields: dict, reads: str) -> None:
    """The tensors that a layer of the result has, and the features that its W_O is fitted on, written out."""
    config, tensors = source("gpt", **{**fields, "qk_norm": False})
    normal, heads, width, layer, rank = normals(), config.num_key_value_heads, config.head_dim, 1, 8
    columns = heads * width
    made = Latents(config, tensors, 0.9, separate=reads == "nothing")
    combine, restore, _ = approximate(positive(normal, columns), positive(normal, columns))
    stored = {"gram": positive(normal, 2 * columns if made.from_keys[0] else columns)}
    stored |= {"keys.combine": combine, "keys.restore": restore, "keys.gains": torch.ones(columns).double()}
    made._measured = lambda layer: stored
    made.ranks = [columns, rank, columns]
    key_rank = columns - 4 if reads == "latent keys" else columns
    made.key_ranks = [columns, key_rank, columns]
    name = f"model.layers.{layer}.self_attn"
    weight, bias = tensors[f"{name}.v_proj.weight"], tensors.get(f"{name}.v_proj.bias")
    key, key_bias = tensors[f"{name}.k_proj.weight"], tensors.get(f"{name}.k_proj.bias", 0.0)
    chosen = combine[:, :key_rank] if reads == "latent keys" else torch.eye(columns).double()
    found = made.reduce(layer)
    written = found.attention_tensors(found.output)
    normed, patterns = normal(2, 5, config.hidden_size), normal(2, config.num_attention_heads, 5, 5).softmax(-1)

    output = split_heads(config, tensors, layer).output.mT
    of_values = value_latents(stored["gram"], output, None if reads == "nothing" else chosen)
    first, last = of_values.combine[:, :rank], of_values.restore[:rank]
    values, held = normed @ weight.T, (normed @ key.T + key_bias) @ chosen
    made_of_keys = held @ of_values.from_keys if reads != "nothing" else 0.0
    values = made_of_keys + (values - made_of_keys) @ first @ last + (0 if bias is None else bias)
    by_head, group = values.split(width, dim=-1), config.num_attention_heads // heads
    features = [patterns[:, query] @ by_head[query // group] for query in range(config.num_attention_heads)]
    features += [torch.ones(2, 5, 1).double()] * config.attention_output_bias
    assert_near(found.features(normed, patterns), torch.cat(features, dim=-1), 1e-12)
    # What is written makes the same values.
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in written.values())
    parts = [normed @ written["v_proj.weight"].double().T]
    if reads != "nothing":
        of_keys = normed @ written.get("k_proj.weight", key).double().T
        parts.append(of_keys + written.get("k_proj.bias", key_bias))
    up = torch.cat(parts, dim=-1) @ written["v_up_proj.weight"].double().T + written.get("v_up_proj.bias", 0.0)
    assert_near(up, values, 200 * EPS)
    assert ("v_up_proj.bias" in written) == config.attention_bias
    assert written["v_proj.weight"].shape == (rank, config.hidden_size)
    assert torch.equal(written["o_proj.weight"], tensors[f"{name}.o_proj.weight"].float())
    assert ("o_proj.bias" in written) == config.attention_output_bias
    # A layer that keeps its values changes its W_O alone.
    kept = made.reduce(0)
    assert not kept.tensors
    values = normed @ tensors["model.layers.0.self_attn.v_proj.weight"].T
    if bias is not None:
        values = values + tensors["model.layers.0.self_attn.v_proj.bias"]
    assert_near(kept.features(normed, patterns)[..., :width], patterns[:, 0] @ values[..., :width], 1e-13)


# --- nothing is lost where nothing need be ----------------------------------------------------------------------------


def with_narrow_values(config: LeanConfig, tensors: dict[str, Tensor], ranks: list[int]) -> Model:
    """The same model with values of these ranks; their biases stay, and take no column."""
    result, normal = dict(tensors), normals(7)
    for layer, rank in enumerate(ranks):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        result[name] = 0.2 * normal(len(result[name]), rank) @ normal(rank, config.hidden_size) / rank**0.5
    return config, result


@pytest.mark.parametrize("name", [*SOURCES, "mqa"])
def test_nothing_is_lost_where_values_are_narrow(name: str, tmp_path: Path) -> None:
    """Every layer's values have fewer directions than columns, of other numbers: those are its rank, and the logits
    stay the same. Keys would explain a part of the values, and with it such directions."""
    shape, mechanisms, fields = SOURCES.get(name, ("llama", ("mqa",), {}))
    config, tensors = source(shape, *mechanisms, **fields)
    width = value_width(config)
    step = step_of(width)
    ranks = [step * (1 + (layer + 1) % (width // step - 1)) for layer in range(config.num_hidden_layers)]
    model = with_narrow_values(config, tensors, ranks)
    source_bytes = config.plan.kv_bytes_per_token(torch.bfloat16)
    share = 1 - 2 * sum(width - rank for rank in ranks) / source_bytes
    found = to_latents(model, sample_of(config, 16), tmp_path, share, keys=False, separate=True, batch_size=3)
    assert [at["rank"] for at in found.layers] == ranks
    assert all(at["missed"] < EPS for at in found.layers)
    assert found.config.plan.kv_bytes_per_token(torch.bfloat16) == pytest.approx(share * source_bytes, rel=1e-12)
    ids = tokens(2, 12, config.vocab_size)
    assert_near(logits(found.config, found.tensors, ids), logits(*model, ids), 128 * EPS)


def test_wide_values_do_lose(tmp_path: Path) -> None:
    """Without narrow values the same measure is far from zero, and a larger share loses less."""
    model, ids, errors = source("llama"), tokens(2, 12), []
    expected = logits(*model, ids)
    for share in (0.65, 0.84):
        found = to_latents(model, sample_of(model[0], 16), tmp_path / str(share), share, keys=False, separate=True)
        with pytest.raises(AssertionError, match="off by"):
            assert_near(logits(found.config, found.tensors, ids), expected, 1e-2)
        errors.append(float((logits(found.config, found.tensors, ids) - expected).square().mean()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}, {"position_embedding_type": "none"}])
def test_keys_as_wide_as_the_stream_hold_the_values(fields: dict, tmp_path: Path) -> None:
    """W_K is square, and orthogonal so that nothing is lost to rounding: the fewest columns of values lose nothing."""
    config, tensors = source("llama", **fields)
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        tensors[name] = torch.linalg.qr(tensors[name]).Q
    width = value_width(config)
    assert width == config.hidden_size
    share = (width + step_of(width)) / (2 * width)
    ids, errors = tokens(2, 12, config.vocab_size), {}
    for separate in (False, True):
        out = tmp_path / str(separate)
        sample = sample_of(config, 16)
        found = to_latents((config, tensors), sample, out, share, keys=False, separate=separate)
        assert [at["rank"] for at in found.layers] == [step_of(width)] * config.num_hidden_layers
        lost = logits(found.config, found.tensors, ids) - logits(config, tensors, ids)
        errors[separate] = float(lost.abs().max() / logits(config, tensors, ids).abs().max())
    assert errors[False] < 1e-4 and errors[True] > 1e-2


def test_other_layers_keep_their_values(tmp_path: Path) -> None:
    model = source("llama", **SMALL, num_hidden_layers=4)
    found = to_latents(model, sample_of(model[0], 8), tmp_path, 0.9, layers=(1, 3), keys=False)
    ranks = [at["rank"] for at in found.layers]
    assert ranks[0] == ranks[2] == 24 and {*ranks[1::2]} <= {8, 16, 24} and sum(ranks) == 72
    assert torch.equal(found.tensors["model.layers.2.self_attn.v_proj.weight"].double(), rounded(model, 2))
    assert "model.layers.2.self_attn.v_up_proj.weight" not in found.tensors


def rounded(model: Model, layer: int) -> Tensor:
    return model[1][f"model.layers.{layer}.self_attn.v_proj.weight"].float().double()


# --- keys beside values -----------------------------------------------------------------------------------------------

WITH_KEYS = {
    "gpt with biases": ("gpt", (), BIASES),
    "no positions": ("gpt", (), {"position_embedding_type": "none"}),
    "llama": ("llama", (), {"attention_bias": True}),
    "gqa, windows": ("llama", ("gqa",), {"sliding_window": 4, "window_layers": [1]}),
    "layers without rotary positions": ("llama", (), {"rope_layers": [0, 2]}),
    "nonlinear query": ("llama", ("nonlinear-query",), {}),
}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", WITH_KEYS)
def test_the_result_is_what_was_fitted(name: str, separate: bool, tmp_path: Path) -> None:
    """The source with the keys and values of the fit written out, and the result with its latents: the same logits."""
    shape, mechanisms, fields = WITH_KEYS[name]
    model = source(shape, *mechanisms, **fields)
    config, chosen = model[0], Latents(*model, 0.55 if "gqa" in mechanisms else 0.45, separate=separate)
    (found,) = sweeping(model, sample_of(config, 16), tmp_path, [chosen]).run()
    assert min(chosen.key_ranks) < chosen.width and min(chosen.ranks) < chosen.width
    dense = dict(model[1])
    for layer in range(config.num_hidden_layers):
        attention, heads = f"model.layers.{layer}.self_attn", chosen.reduce(layer)
        key, value = heads.key, heads.value.transpose(1, 2).flatten(0, 1)
        for side, matrix in (("k_proj", key), ("v_proj", value)):
            if matrix is not None:
                dense[f"{attention}.{side}.weight"] = matrix[:, : config.hidden_size]
                if config.attention_bias:
                    dense[f"{attention}.{side}.bias"] = matrix[:, -1]
        for part in ("o_proj.weight", "o_proj.bias")[: 1 + config.attention_output_bias]:
            dense[f"{attention}.{part}"] = found.tensors[f"{attention}.{part}"]
    ids = tokens(2, 12, config.vocab_size)
    assert_near(logits(found.config, found.tensors, ids), logits(config, dense, ids), 128 * EPS)


def test_nothing_is_lost_where_keys_are_narrow_too(tmp_path: Path) -> None:
    """The second half of the key heads are the first times a complex factor at every frequency."""
    config, tensors = source("llama", attention_bias=True)
    half, tensors = config.head_dim // 2, dict(tensors)
    for layer in range(config.num_hidden_layers):
        for part in ("weight", "bias"):
            name = f"model.layers.{layer}.self_attn.k_proj.{part}"
            heads = tensors[name].clone().unflatten(0, (config.num_key_value_heads, config.head_dim))
            for head in range(config.num_key_value_heads // 2):
                a, b = (normals(5 + layer + head)(2, half, *[1] * (heads.dim() - 2))).unbind()
                real, imaginary = heads[head, :half], heads[head, half:]
                heads[-1 - head] = torch.cat((a * real - b * imaginary, a * imaginary + b * real))
            tensors[name] = heads.flatten(0, 1)
    width = value_width(config)
    ranks = [width // 2] * config.num_hidden_layers
    model = with_narrow_values(config, tensors, ranks)
    found = to_latents(model, sample_of(config, 16), tmp_path, 0.5, separate=True)
    assert [(at["key_rank"], at["rank"]) for at in found.layers] == [(rank, rank) for rank in ranks]
    ids = tokens(2, 12, config.vocab_size)
    assert_near(logits(found.config, found.tensors, ids), logits(*model, ids), 128 * EPS)


# --- the result -------------------------------------------------------------------------------------------------------


def test_the_result_is_a_checkpoint(tmp_path: Path) -> None:
    """The same again from the same; the source is untouched; saved, loaded, generated from, decoded."""
    config, tensors = source("llama", "gqa", attention_bias=True, hidden_size=48)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    sample = sample_of(config, 12)
    copy = sample.copy()
    found = to_latents((config, tensors), sample, tmp_path / "first", 0.84)
    again = to_latents((config, tensors), sample, tmp_path / "second", 0.84)
    assert_same(again.tensors, dict(found.tensors))
    assert again.config.to_dict() == found.config.to_dict() and again.layers == found.layers
    assert np.array_equal(copy, sample) and all(torch.equal(before[name], tensors[name]) for name in tensors)
    for other in (1, 5, 12):  # batches decide nothing but rounding
        rows = to_latents((config, tensors), sample, tmp_path / f"batch{other}", 0.84, batch_size=other)
        assert (rows.config.value, rows.config.key) == (found.config.value, found.config.key)

    target = found.config
    assert {name: tuple(found.tensors[name].shape) for name in found.tensors} == target.plan.parameter_shapes
    assert target.plan.kv_bytes_per_token(torch.float32) <= 0.84 * config.plan.kv_bytes_per_token(torch.float32)
    for name, tensor in found.tensors.items():
        assert tensor.dtype == torch.float32
        if not any(part in name for part in ("v_proj", "v_up_proj", "k_proj", "k_up_proj", "o_proj.weight")):
            assert torch.equal(tensor, tensors[name].float())

    model = build(target, found.tensors).float()
    model.save_pretrained(tmp_path / "saved")
    loaded = LeanForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = tokens(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    texts = [loaded.generate(ids, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*texts)
    assert torch.equal(Decoder(loaded).generate(ids, max_new_tokens=8), texts[0])


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, LeanConfig, float, tuple[int, ...] | None]] = {
    "too little": ("from 25% of its cache .* --cache 20% is out of reach. For less", tiny("llama"), 0.2, None),
    "too little of one layer": ("from 75% of its cache", tiny("llama"), 0.74, (1,)),
    "none": ("--cache 0% is out", tiny("llama"), 0.0, None),
    "all": ("--cache 100% is out", tiny("llama"), 1.0, None),
    "more than all": ("--cache 150% is out", tiny("llama"), 1.5, None),
    "negative": ("--cache -5% is out", tiny("llama"), -0.05, None),
    "no number": ("--cache nan% is out", tiny("llama"), float("nan"), None),
    "infinite": ("--cache inf% is out", tiny("llama"), float("inf"), None),
    "layer beyond": ("layers 0 to 2, found 3", tiny("llama"), 0.8, (1, 3)),
    "layer below": ("found -1", tiny("llama"), 0.8, (-1,)),
    "no layer": ("from 100% of its cache", tiny("llama"), 0.8, ()),
    "latent": ("MLA", tiny("llama", "mla"), 0.8, None),
    "latent values": ("the value of layer 0 is 'latent'", tiny("llama", "latent-values"), 0.8, None),
    "merged": (
        "converted already",
        tiny("llama", key_value={"type": "borrowed_values", "heads": [[1, 1, 1, 0]]}),
        0.8,
        None,
    ),
    "skipv1": ("converted already", tiny("llama", "skipv1"), 0.8, None),
    "identity value": ("'identity'", tiny("llama", "identity-value"), 0.8, None),
    "shared blocks": ("num_hidden_groups", tiny("llama", num_hidden_groups=3), 0.8, None),
    "reads the MLP": ("'from_mlp'", tiny("llama", "mlp-query:layers=2"), 0.8, None),
    "depth averages": ("depth_average", tiny("llama", "denseformer:period=2"), 0.8, None),
    "no cache": ("its task is 'masked_lm'", tiny("llama", task="masked_lm"), 0.8, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    match, config, share, layers = REFUSED[name]
    with pytest.raises(LeanError, match=match) as refusal:
        Latents(config, {}, share, layers)
    assert "\n" not in str(refusal.value)
