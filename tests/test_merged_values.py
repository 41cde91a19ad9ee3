"""Merged values: every sum, pair and choice against loops and other optimizers, and the conversion as a whole."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from converting import BIASES, build, logits, source
from reducing import EPS, SMALL, SOURCES, Model, assert_same, merge, normals, sample_of, seen_by_hooks, sweeping
from safetensors.torch import load_file
from scipy.optimize import minimize
from shapes import assert_near, tiny, tokens
from torch import Tensor

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.convert.merged_values import (
    MergedValues,
    Pair,
    PairGrams,
    _pairs,
    choose_pairs,
    count_merges,
    fit_pair,
    merge_heads,
)
from leanqkv.convert.output_fit import token_weights
from leanqkv.inference import Decoder


def with_dependent_heads(config: LeanConfig, tensors: dict[str, Tensor], pairs: dict[int, tuple[int, int]]) -> Model:
    """The same model with the second head's values a matrix times the first's, so that merging both loses nothing."""
    result, normal, width = {name: tensor.clone() for name, tensor in tensors.items()}, normals(7), config.head_dim
    for layer, (first, second) in pairs.items():
        matrix = normal(width, width)
        for name in ("v_proj.weight", "v_proj.bias"):
            if (value := result.get(f"model.layers.{layer}.self_attn.{name}")) is not None:
                value[second * width :][:width] = matrix @ value[first * width :][:width]
    return config, result


# --- Gram matrices of attended values ---------------------------------------------------------------------------------


def gram_by_loops(patterns: Tensor, values: Tensor, weight: Tensor, pair: tuple[int, int]) -> Tensor:
    """patterns [batch, query heads, length, length], values [batch, value heads, length, head_dim]."""
    group = patterns.shape[1] // values.shape[1]
    width = 2 * values.shape[3]
    gram = torch.zeros(width, width, dtype=torch.float64)
    for b in range(len(patterns)):
        both = torch.cat([values[b, head] for head in pair], dim=-1)
        for head in pair:
            for query in range(head * group, (head + 1) * group):
                for t in range(patterns.shape[2]):
                    row = weight[b, t] * sum(patterns[b, query, t, s] * both[s] for s in range(len(both)))
                    gram += torch.outer(row, row)
    return gram


@pytest.mark.parametrize("group", [1, 3])
def test_gram_matrices_of_attended_values(group: int) -> None:
    normal, heads, width, length = normals(), 3, 2, 4
    grams, expected = PairGrams(heads, width), dict.fromkeys(combinations(range(heads), 2), 0.0)
    for batch in (2, 1):
        patterns, weight = normal(batch, heads * group, length, length).softmax(-1), normal(batch, length).exp()
        values = normal(batch, heads, length, width)
        grams.add(SimpleNamespace(values=values, patterns=patterns), weight)
        for pair in expected:
            expected[pair] += gram_by_loops(patterns, values, weight, pair)
    for pair, gram in expected.items():
        assert_near(grams.of_pair(*pair), gram, 1e-13)


@pytest.mark.parametrize(
    "shape, fields",
    [
        ("gpt", BIASES | {"num_attention_heads": 6, "num_key_value_heads": 2}),
        ("llama", {"sliding_window": 3, "window_layers": [1], "num_attention_heads": 2}),
    ],
)
@torch.no_grad()
def test_gram_matrices_of_a_model(shape: str, fields: dict, tmp_path: Path) -> None:
    """As the first sweep makes them, from its own stream and under the right masks, against the model itself."""
    model = source(shape, **SMALL | fields)
    config, sample = model[0], sample_of(model[0], 4, 6)
    streams, values, patterns = seen_by_hooks(model, sample)
    sweeps = sweeping(model, sample, tmp_path, "merged", batch_size=3)
    sweeps._embed()
    for layer in range(config.num_hidden_layers):
        grams, block = PairGrams(config.num_key_value_heads, config.head_dim), sweeps.source.block(layer)
        for batch in sweeps.batches:
            stream = sweeps._read("source", layer, batch)
            sweeps._stream("source", layer + 1)[batch] = sweeps.source.run(block, layer, stream)
            (recorder,) = sweeps.source.attend(block, layer, stream)[1]
            grams.add(recorder, token_weights(stream, config.norm_eps)[0])
        by_head = values[layer].unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        weight = (streams[layer].square().mean(-1) + config.norm_eps).rsqrt()
        for pair in combinations(range(config.num_key_value_heads), 2):
            assert_near(grams.of_pair(*pair), gram_by_loops(patterns[layer], by_head, weight, pair), 100 * EPS)


# --- one merged value -------------------------------------------------------------------------------------------------


def pair_problem(width: int, group: int, values: Tensor, seed: int = 3) -> tuple[Tensor, Tensor, Callable]:
    """Gram matrix, weight and the explicit error of `combine` and `restore`; every pattern of every query head."""
    normal, rows = normals(seed), len(values)
    patterns = [normal(rows, rows).softmax(-1) for _ in range(2 * group)]
    outputs = [[normal(width, 5) for _ in range(group)] for _ in range(2)]
    gram = sum((pattern @ values).T @ (pattern @ values) for pattern in patterns)
    weight = torch.block_diag(*(sum(output @ output.T for output in head) for head in outputs))

    def error(combine: Tensor, restore: Tensor) -> Tensor:
        left = values - values @ combine @ restore
        return sum(
            (pattern @ left[:, head * width : (head + 1) * width] @ output).square().sum()
            for pattern in patterns
            for head in range(2)
            for output in outputs[head]
        )

    return gram, weight, error


@pytest.mark.parametrize("group", [1, 3])
def test_no_other_merged_value_loses_less(group: int) -> None:
    width, normal = 2, normals()
    gram, weight, error = pair_problem(width, group, normal(30, 2 * width))
    pair = fit_pair(gram, weight, 4, (1, 3), scale=8.0)
    assert (pair.layer, pair.heads) == (4, (1, 3))
    lost = float(error(pair.combine, pair.restore))
    assert pair.cost * 8 == pytest.approx(lost, rel=1e-9)

    def split(flat: np.ndarray | Tensor) -> list[Tensor]:
        parts = torch.as_tensor(flat).view(2, -1)
        return [parts[0].view(2 * width, width), parts[1].view(width, 2 * width)]

    def of_flat(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parts = torch.from_numpy(flat).requires_grad_()
        value = error(*split(parts))
        return float(value.detach()), torch.autograd.grad(value, parts)[0].numpy()

    found = [minimize(of_flat, normal(4 * width * width).numpy(), jac=True, tol=1e-12) for _ in range(4)]
    assert min(result.fun for result in found) == pytest.approx(lost, rel=1e-6)
    assert all(result.fun >= lost * (1 - 1e-9) for result in found)


@pytest.mark.parametrize("kind", ["times a matrix", "the same", "few dimensions", "second is zero", "both are zero"])
def test_dependent_values_are_merged_without_loss(kind: str) -> None:
    width, normal = 3, normals()
    first = normal(40, width)
    second = {
        "times a matrix": first @ normal(width, width),
        "the same": first,
        "few dimensions": first[:, :1] @ normal(1, width),
        "second is zero": torch.zeros(40, width),
        "both are zero": torch.zeros(40, width),
    }[kind].double()
    if kind == "few dimensions":
        first = normal(40, 2) @ normal(2, width)
        second = normal(40, 1) @ normal(1, width)
    values = torch.cat((first * (kind != "both are zero"), second), dim=1)
    gram, weight, error = pair_problem(width, 2, values)
    pair = fit_pair(gram, weight, 0, (0, 1), 1.0)
    size = float(error(torch.zeros(2 * width, width).double(), torch.zeros(width, 2 * width).double()))
    assert pair.combine.isfinite().all() and pair.restore.isfinite().all()
    assert 0 <= pair.cost <= 1e-12 * size and float(error(pair.combine, pair.restore)) <= 1e-12 * size


@pytest.mark.parametrize("zero", [slice(0, 3), slice(3, 6), slice(0, 6)])
def test_heads_without_output_weights(zero: slice) -> None:
    """A pruned head costs nothing, and the matrices are finite."""
    gram, weight, _ = pair_problem(3, 1, normals()(40, 6))
    weight[zero], weight[:, zero] = 0, 0
    pair = fit_pair(gram, weight, 0, (0, 1), 1.0)
    assert pair.combine.isfinite().all() and pair.restore.isfinite().all()
    left = torch.eye(6).double() - pair.combine @ pair.restore
    assert pair.cost <= 1e-12 * gram.max() * (weight.max() + 1)
    assert float((left.T @ gram @ left * weight).sum()) <= 1e-9 * float((gram * weight).sum())


@pytest.mark.parametrize("fields", [{}, BIASES, {"num_attention_heads": 8, "num_key_value_heads": 4} | BIASES])
def test_merged_heads(fields: dict) -> None:
    """The combined values and W_O of two pairs, head by head, written out."""
    config, tensors = source("gpt", **fields)
    normal, width, layer = normals(), config.head_dim, 1
    pairs = [Pair(layer, heads, 0.0, normal(2 * width, width), normal(width, 2 * width)) for heads in [(0, 3), (1, 2)]]
    merged = merge_heads(config, tensors, layer, pairs)
    name, group = f"model.layers.{layer}.self_attn", config.num_attention_heads // config.num_key_value_heads
    weight, output = tensors[f"{name}.v_proj.weight"], tensors[f"{name}.o_proj.weight"]
    bias = tensors.get(f"{name}.v_proj.bias")
    expected = output.clone()
    values, biases = [], []
    for pair in pairs:
        first, second = (slice(head * width, (head + 1) * width) for head in pair.heads)
        values.append(pair.combine.T @ torch.cat((weight[first], weight[second])))
        if bias is not None:
            biases.append(pair.combine.T @ torch.cat((bias[first], bias[second])))
        for half, head in enumerate(pair.heads):
            for query in range(head * group, (head + 1) * group):
                columns = slice(query * width, (query + 1) * width)
                expected[:, columns] = output[:, columns] @ pair.restore[:, half * width : (half + 1) * width].T
    found = merged.attention_tensors(merged.output)
    assert_near(found["v_proj.weight"].double(), torch.cat(values), 2 * EPS)
    assert_near(found["o_proj.weight"].double(), expected, 2 * EPS)
    assert len(found) == 2 + 2 * (bias is not None)
    if bias is not None:
        assert_near(found["v_proj.bias"].double(), torch.cat(biases), 2 * EPS)
        assert torch.equal(found["o_proj.bias"], tensors[f"{name}.o_proj.bias"].float())
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in found.values())


# --- nothing is lost where nothing need be ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_lost_where_values_depend(name: str, tmp_path: Path) -> None:
    """One pair of heads in every layer can be merged exactly: those are chosen, and the logits stay the same."""
    shape, mechanisms, fields = SOURCES[name]
    config, tensors = source(shape, *mechanisms, **fields)
    heads, layers = config.num_key_value_heads, range(config.num_hidden_layers)
    pairs = {layer: list(combinations(range(heads), 2))[-1 - layer % 2 * (heads > 2)] for layer in layers}
    model = with_dependent_heads(config, tensors, pairs)
    options = {"ratio": 1 / heads, "layers": tuple(layers), "batch_size": 3}
    found = merge(model, sample_of(config, 16), tmp_path, **options)
    assert [at["merged"] for at in found.layers] == [[list(pairs[layer])] for layer in layers]
    assert found.config.key_value["heads"] == [[i, second, i, first] for i, (first, second) in pairs.items()]
    assert all(at["missed"] < EPS for at in found.layers)
    ids = tokens(2, 12, config.vocab_size)
    assert_near(logits(found.config, found.tensors, ids), logits(*model, ids), 32 * EPS)


def test_other_pairs_do_lose(tmp_path: Path) -> None:
    """Without dependent values the same measure is far from zero."""
    model = source("llama")
    found = merge(model, sample_of(model[0], 16), tmp_path)
    ids = tokens(2, 12)
    with pytest.raises(AssertionError, match="off by"):
        assert_near(logits(found.config, found.tensors, ids), logits(*model, ids), 1e-2)
    assert sum(len(at["merged"]) for at in found.layers) == 4


@torch.no_grad()
def test_the_cost_is_what_merging_loses(tmp_path: Path) -> None:
    """Of every pair in every layer, from the model's own patterns: the mean over both heads' patterns."""
    model = source("llama", **SMALL, num_key_value_heads=2)
    config, sample = model[0], sample_of(model[0], 4, 6)
    streams, values, patterns = seen_by_hooks(model, sample)
    sweeps = sweeping(model, sample, tmp_path, "merged")
    sweeps.run()
    width, group = config.head_dim, 2
    for i in range(config.num_hidden_layers):
        (pair,) = _pairs(load_file(sweeps._file("pairs", i)), i)
        left = values[i] - values[i] @ pair.combine @ pair.restore  # both heads are all there are
        output = model[1][f"model.layers.{i}.self_attn.o_proj.weight"].split(width, dim=1)
        weight = (streams[i].square().mean(-1) + config.norm_eps).rsqrt()[..., None]
        lost = 0.0
        for query in range(2 * group):
            head = query // group
            for pattern in range(2 * group):
                row = patterns[i][:, pattern] @ left[..., head * width : (head + 1) * width] @ output[query].T
                lost += float((row * weight).square().sum())
        assert pair.cost == pytest.approx(lost / (2 * group) / sample.size / config.hidden_size, rel=1e-4)


# --- the choice -------------------------------------------------------------------------------------------------------


def candidates(layers: int, heads: int, seed: int) -> list[Pair]:
    generator, empty = np.random.default_rng(seed), torch.empty(0)
    return [
        Pair(layer, pair, float(generator.random()), empty, empty)
        for layer in range(layers)
        for pair in combinations(range(heads), 2)
    ]


@pytest.mark.parametrize("heads", [2, 4, 5])
def test_pairs_are_chosen_cheapest_first(heads: int) -> None:
    """No head is in two pairs, the count is right, and each is the cheapest that those before it leave."""
    for seed in range(20):
        options = candidates(3, heads, seed)
        for count in range(1, 3 * (heads // 2) + 1):
            chosen = choose_pairs(options[:: 1 if seed % 2 else -1], count)
            found = sorted((pair for pairs in chosen.values() for pair in pairs), key=lambda pair: pair.cost)
            assert all(pair.layer == layer for layer, pairs in chosen.items() for pair in pairs)
            assert len(found) == count
            taken: set[tuple[int, int]] = set()
            for pair in found:
                left = [o for o in options if not {(o.layer, head) for head in o.heads} & taken]
                assert pair.cost == min(o.cost for o in left)
                taken |= {(pair.layer, head) for head in pair.heads}
            assert len(taken) == 2 * count
        with pytest.raises(LeanError, match=f"only {3 * (heads // 2)} disjoint pairs"):
            choose_pairs(options, 3 * (heads // 2) + 1)


def test_merges_are_restricted_to_layers(tmp_path: Path) -> None:
    model = source("llama", **SMALL, num_hidden_layers=4)
    found = merge(model, sample_of(model[0], 4), tmp_path, layers=(1, 3, 1))
    assert [len(at["merged"]) for at in found.layers] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    "ratio, layers, expected", [(0.5, None, 4), (0.25, None, 2), (0.49, (1,), 1), (0.5, (0, 2), 4), (0.5, (2, 2), 2)]
)
def test_as_many_as_skipv1_borrows(ratio: float, layers: tuple[int, ...] | None, expected: int) -> None:
    assert count_merges(tiny("llama"), ratio, layers) == expected


BORROWED = {"type": "borrowed_values", "heads": [[1, 1, 1, 0]]}
REFUSED: dict[str, tuple[str, LeanConfig, float, tuple[int, ...] | None]] = {
    "ratio of zero": ("a ratio of 0", tiny("llama"), 0.0, None),
    "too small": ("merges 0 pairs of 4", tiny("llama"), 0.24, None),
    "too large": ("merges 3 pairs of 4", tiny("llama"), 0.75, None),
    "negative": ("a ratio of -1", tiny("llama"), -1.0, None),
    "no number": ("a ratio of nan", tiny("llama"), float("nan"), None),
    "one value head": ("of 1 value heads", tiny("llama", "mqa"), 0.5, None),
    "layer beyond": ("layers 0 to 2, found 3", tiny("llama"), 0.5, (1, 3)),
    "layer below": ("found -1", tiny("llama"), 0.5, (-1,)),
    "no layer": ("no layer's values", tiny("llama"), 0.5, ()),
    "one layer": ("no layer's values", tiny("llama", num_hidden_layers=1), 0.5, None),
    "latent": ("MLA", tiny("llama", "mla"), 0.5, None),
    "converted": (
        "converted already",
        tiny("llama", key_value=BORROWED),
        0.5,
        None,
    ),
    "skipv1": ("converted already", tiny("llama", "skipv1"), 0.5, None),
    "identity value": ("'identity'", tiny("llama", "identity-value"), 0.5, None),
    "shared blocks": ("num_hidden_groups", tiny("llama", num_hidden_groups=3), 0.5, None),
    "reads the MLP": ("'from_mlp'", tiny("llama", "mlp-query:layers=2"), 0.5, None),
    "depth averages": ("depth_average", tiny("llama", "denseformer:period=2"), 0.5, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    match, config, ratio, layers = REFUSED[name]
    with pytest.raises(LeanError, match=match) as refusal:
        MergedValues(config, {}, ratio, layers)
    assert "\n" not in str(refusal.value)


def test_the_result_is_a_checkpoint(tmp_path: Path) -> None:
    """The same again from the same; the source is untouched; saved, loaded, generated from, decoded."""
    config, tensors = source("llama", **SMALL)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    sample = sample_of(config, 8)
    copy = sample.copy()
    found = merge((config, tensors), sample, tmp_path / "first")
    target, converted, report = found.config, found.tensors, found.layers
    again = merge((config, tensors), sample, tmp_path / "second")
    assert_same(again.tensors, dict(converted))
    assert again.config.to_dict() == target.to_dict() and again.layers == report
    assert np.array_equal(copy, sample) and all(torch.equal(before[name], tensors[name]) for name in tensors)
    for other in (1, 3, 8):  # batches decide nothing but rounding
        rows = merge((config, tensors), sample, tmp_path / f"batch{other}", batch_size=other).config.key_value
        assert rows == target.key_value

    assert target.key_value["type"] == "borrowed_values"
    rows = target.key_value["heads"]
    assert len(rows) == 4 and all(row[0] == row[2] and row[3] < row[1] for row in rows)
    merged = {(at["layer"], *pair) for at in report for pair in at["merged"]}
    assert merged == {(layer, first, second) for layer, second, _, first in rows}
    assert target.plan.kv_bytes_per_token(torch.float32) < config.plan.kv_bytes_per_token(torch.float32)
    for name, tensor in converted.items():
        assert tensor.dtype == torch.float32
        if not name.endswith(("v_proj.weight", "o_proj.weight")):
            assert torch.equal(tensor, tensors[name].float())

    model = build(target, converted).float()
    model.save_pretrained(tmp_path / "saved")
    loaded = LeanForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = tokens(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    texts = [loaded.generate(ids, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*texts)
    assert torch.equal(Decoder(loaded).generate(ids, max_new_tokens=8), texts[0])
