"""Merged values: every sum, fit and choice against loops and explicit features, and the conversion as a whole."""

import json
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from converting import BIASES, build, logits, source
from safetensors import SafetensorError
from safetensors.torch import load_file
from scipy.optimize import minimize
from shapes import assert_near, tiny, tokens
from torch import Tensor

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.convert.activations import Layers, Recorder, correction, recording
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
from leanqkv.convert.output_fit import RIDGES, SINK, Fit, fit_output, token_weights
from leanqkv.convert.scratch import Stream
from leanqkv.convert.sweeps import HELD_OUT, Sweeps
from leanqkv.inference import Decoder

LLAMA_BIASES = BIASES | {"norm_bias": False}
THREES = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4}
EPS = torch.finfo(torch.float32).eps
SMALL = {"hidden_size": 24, "intermediate_size": 16}
Model = tuple[LeanConfig, dict[str, Tensor]]


def normals(seed: int = 0) -> Callable[..., Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_dependent_heads(config: LeanConfig, tensors: dict[str, Tensor], pairs: dict[int, tuple[int, int]]) -> Model:
    """The same model with the second head's values a matrix times the first's, so that merging both loses nothing."""
    result, normal, width = {name: tensor.clone() for name, tensor in tensors.items()}, normals(7), config.head_dim
    for layer, (first, second) in pairs.items():
        matrix = normal(width, width)
        for name in ("v_proj.weight", "v_proj.bias"):
            if (value := result.get(f"model.layers.{layer}.self_attn.{name}")) is not None:
                value[second * width :][:width] = matrix @ value[first * width :][:width]
    return config, result


def merge(model: Model, sample: np.ndarray, directory: Path, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    directory.mkdir(exist_ok=True)
    (converted,) = merging(model, sample, directory, **options).run()
    return converted.config, converted.tensors, {"layers": converted.layers}


def merging(
    model: Model, sample: np.ndarray, directory: Path, *, ratio: float = 0.5, layers: Any = None, **options: Any
) -> Sweeps:
    return Sweeps(*model, sample, directory, [MergedValues(*model, ratio, layers)], **options)


def sample_of(config: LeanConfig, sequences: int, length: int = 12, seed: int = 5) -> np.ndarray:
    return tokens(sequences, length, config.vocab_size, seed).numpy()


def eager(config: LeanConfig, tensors) -> LeanForCausalLM:
    model = build(config, tensors)
    model.set_attn_implementation("eager")
    return model


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


def seen_by_hooks(model, sample):
    """The stream before every layer and its values, by layer, and the patterns of all layers."""
    reference, streams, values = eager(*model), {}, {}
    for i, layer in enumerate(reference.model.layers):
        layer.register_forward_pre_hook(lambda m, x, i=i: streams.update({i: x[0]}))
        layer.self_attn.v_proj.register_forward_hook(lambda m, x, y, i=i: values.update({i: y}))
    patterns = reference(torch.from_numpy(sample), output_attentions=True).attentions
    return streams, values, patterns


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
    sweeps = merging(model, sample, tmp_path, batch_size=3)
    sweeps._embed()
    for layer in range(config.num_hidden_layers):
        grams, block = PairGrams(config.num_key_value_heads, config.head_dim), sweeps.source.block(layer)
        for batch in sweeps._batches():
            with recording(block) as recorder:
                stream = sweeps._read("source", layer, batch)
                sweeps._stream("source", layer + 1)[batch] = sweeps.source.run(block, layer, stream)
            grams.add(recorder, token_weights(stream, config.norm_eps)[0])
        by_head = values[layer].unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        weight = (streams[layer].square().mean(-1) + config.norm_eps).rsqrt()
        for pair in combinations(range(config.num_key_value_heads), 2):
            assert_near(grams.of_pair(*pair), gram_by_loops(patterns[layer], by_head, weight, pair), 100 * EPS)


def test_float64_is_on_the_cpu_alone(monkeypatch) -> None:
    """Apple's GPUs have none; a CPU cannot tell, but that a tensor was moved before it became one in float64."""
    moved, cpu, double, normal = [], Tensor.cpu, Tensor.double, normals()
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(cpu(tensor)) or moved[-1])

    def checked(tensor: Tensor) -> Tensor:
        assert any(tensor is other for other in moved)
        return double(tensor)

    patterns, stream = normal(1, 4, 5, 5).float(), normal(1, 5, 6).float()
    grams, fit, recorder = PairGrams(2, 3), Fit(), SimpleNamespace(values=patterns[:, :2, :, :3], patterns=patterns)
    monkeypatch.setattr(Tensor, "double", checked)
    grams.add(recorder, token_weights(stream, 1e-5)[0])
    fit.add(stream[0], stream[0])
    assert fit.target > 0 and all(sums.dtype == torch.float64 for sums in (grams.alone, grams.cross, fit.gram))


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

EXACT: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "gpt": ("gpt", (), {}),
    "gpt with biases": ("gpt", (), BIASES),
    "value bias alone": ("gpt", (), {"attention_bias": True}),
    "output bias alone": ("llama", (), {"attention_output_bias": True}),
    "llama": ("llama", (), {}),
    "gqa": ("llama", ("gqa",), {}),
    "groups of three": ("llama", (), LLAMA_BIASES | THREES),
    "parallel": ("gpt", (), {"block_type": "parallel"}),
    "parallel, one norm": ("llama", (), {"block_type": "parallel_shared_norm"}),
    "no attention skip": ("llama", (), {"attention_skip": False}),
    "no skips": ("gpt", (), {"attention_skip": False, "mlp_skip": False}),
    "norms after": ("llama", (), {"norm_placement": "after"}),
    "norms before and after": ("llama", (), {"norm_placement": "both"} | LLAMA_BIASES),
    "no norms": ("gpt", (), {"norm_type": "none"}),
    "dyt": ("llama", (), {"norm_type": "dyt", "head_dim": 6}),
    "residual_multiplier": ("llama", (), {"residual_multiplier": 0.3}),
    "multipliers": ("llama", (), {"embedding_multiplier": 3.0, "residual_multiplier": 2.0}),
    "qk_norm": ("llama", ("gqa",), {"qk_norm": True}),
    "windows": ("llama", (), {"sliding_window": 4, "window_layers": [0, 2]}),
    "identity query": ("gpt", ("identity-query",), {}),
    "residual query, identity key": ("llama", ("residual-query", "identity-key"), {}),
    "nonlinear query": ("gpt", ("nonlinear-query",), {}),
    "moe": ("llama", (), {"mlp_type": "moe", "num_local_experts": 4}),
    "no positions": ("gpt", (), {"position_embedding_type": "none"}),
}


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_lost_where_values_depend(name: str, tmp_path: Path) -> None:
    """One pair of heads in every layer can be merged exactly: those are chosen, and the logits stay the same."""
    shape, mechanisms, fields = EXACT[name]
    config, tensors = source(shape, *mechanisms, **fields)
    heads, layers = config.num_key_value_heads, range(config.num_hidden_layers)
    pairs = {layer: list(combinations(range(heads), 2))[-1 - layer % 2 * (heads > 2)] for layer in layers}
    model = with_dependent_heads(config, tensors, pairs)
    options = {"ratio": 1 / heads, "layers": tuple(layers), "batch_size": 3}
    target, converted, report = merge(model, sample_of(config, 16), tmp_path, **options)
    assert [at["merged"] for at in report["layers"]] == [[list(pairs[layer])] for layer in layers]
    assert target.key_value["heads"] == [[i, second, i, first] for i, (first, second) in pairs.items()]
    assert all(at["missed"] < EPS for at in report["layers"])
    ids = tokens(2, 12, config.vocab_size)
    assert_near(logits(target, converted, ids), logits(*model, ids), 32 * EPS)


def test_other_pairs_do_lose(tmp_path: Path) -> None:
    """Without dependent values the same measure is far from zero."""
    model = source("llama")
    target, converted, report = merge(model, sample_of(model[0], 16), tmp_path)
    ids = tokens(2, 12)
    with pytest.raises(AssertionError, match="off by"):
        assert_near(logits(target, converted, ids), logits(*model, ids), 1e-2)
    assert sum(len(at["merged"]) for at in report["layers"]) == 4


# --- the fit of W_O ---------------------------------------------------------------------------------------------------


def fits(columns: int = 6, noise: float = 0.5, seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Features and target of the fit and of what is held out, and the start."""
    normal = normals(seed)
    start = normal(columns, 4)
    true = start + 0.3 * normal(columns, 4)
    parts = []
    for rows in (20, 12):
        features = normal(rows, columns)
        parts.append((features, features @ true + noise * normal(rows, 4)))
    return parts, start


def ridge_by_hand(features: Tensor, target: Tensor, start: Tensor, strength: float) -> Tensor:
    damping = (strength * features.square().sum(0).mean()).sqrt()
    rows = torch.cat((features, damping * torch.eye(features.shape[1], dtype=torch.float64)))
    return torch.linalg.lstsq(rows, torch.cat((target, damping * start))).solution


def fit_by_hand(parts: list[tuple[Tensor, Tensor]], start: Tensor) -> tuple[Tensor, float | None, float]:
    (features, target), (held_features, held_target) = parts

    def missed(output: Tensor) -> float:
        return float((held_target - held_features @ output).square().sum() / held_target.square().sum())

    errors = {strength: missed(ridge_by_hand(features, target, start, strength)) for strength in RIDGES}
    best = min(errors, key=errors.__getitem__)
    if missed(start) <= errors[best]:
        return start, None, missed(start)
    everything = [torch.cat((a, b)) for a, b in zip(*parts, strict=True)]
    return ridge_by_hand(*everything, start, best), best, errors[best]


def test_the_strength_is_the_one_that_misses_least() -> None:
    chosen = set()
    for seed, noise in enumerate(np.geomspace(0.01, 10, 24)):
        parts, start = fits(noise=noise, seed=seed)
        sums = Fit(), Fit()
        for fit, (features, target) in zip(sums, parts, strict=True):
            for rows in (slice(0, 5), slice(5, None)):
                fit.add(features[rows], target[rows])
        output, strength, missed = fit_output(*sums, start)
        expected, best, error = fit_by_hand(parts, start)
        assert strength == best
        assert_near(output, expected, 1e-10)
        assert missed == pytest.approx(error, rel=1e-9)
        assert missed <= sums[1].missed(start)
        chosen.add(strength)
    assert None in chosen and len(chosen) > 4


def test_what_is_right_already_stays() -> None:
    parts, start = fits(noise=0.0)
    sums = Fit(), Fit()
    for fit, (features, _) in zip(sums, parts, strict=True):
        fit.add(features, features @ start)
    output, _, missed = fit_output(*sums, start)
    assert missed < 1e-13
    assert_near(output, start, 1e-12)


# --- the second sweep -------------------------------------------------------------------------------------------------


def test_token_weights_and_sinks() -> None:
    stream = normals()(3, 7, 16)
    stream[1, 2] *= 2 * SINK**0.5 / stream[1, 2].square().mean().sqrt()
    stream[2, 4] *= 0.5 * SINK**0.5 / stream[2, 4].square().mean().sqrt()
    stream[0, 3] = 0
    stream[0, 6] *= 1e-6
    weights, sinks = token_weights(stream.float(), 1e-6)
    assert sinks.nonzero().tolist() == [[1, 2]]
    for b, t in np.ndindex(3, 7):
        square = sum(float(x) ** 2 for x in stream[b, t]) / 16
        assert float(weights[b, t]) == pytest.approx((square + 1e-6) ** -0.5, rel=1e-6)
    assert weights.max() <= 1e3 * (1 + EPS)


SWEEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt with biases": ("gpt", BIASES),
    "gqa, windows": ("llama", {"num_key_value_heads": 2, "sliding_window": 4, "window_layers": [1]}),
    "parallel": ("gpt", {"block_type": "parallel"}),
    "no attention skip": ("llama", {"attention_skip": False}),
    "norms before and after": ("llama", {"norm_placement": "both"}),
    "residual_multiplier": ("llama", {"residual_multiplier": 0.4}),
}


@pytest.mark.parametrize("name", SWEEPS)
@torch.no_grad()
def test_the_second_sweep(name: str, tmp_path: Path) -> None:
    """Its streams are those of both models, and W_O, its strength and what it misses are those of explicit features."""
    shape, fields = SWEEPS[name]
    model = source(shape, **SMALL | {"intermediate_size": 8} | fields)
    config, seen = model[0], {}
    sample = sample_of(config, 128, 10)

    def message(text: str) -> None:
        phase, _, layer, *_ = text.split()
        if phase == "fitting:" and int(layer) > 1:
            at = int(layer) - 1
            seen[at] = [sweeps._stream(of, at)[: len(sample)] for of in ("source", "converted-merged")]

    sweeps = merging(model, sample, tmp_path, batch_size=7, message=message)
    (result,) = sweeps.run()
    target, converted, report = result.config, result.tensors, {"layers": result.layers}
    last = config.num_hidden_layers
    seen[last] = [sweeps._stream(of, last)[: len(sample)] for of in ("source", "converted-merged")]

    ids, streams = torch.from_numpy(sample), [{}, {}]
    inputs, attended = [{}, {}], [{}, {}]
    for which, reference in enumerate((build(*model), build(target, converted))):
        for i, layer in enumerate(reference.model.layers):
            layer.register_forward_pre_hook(lambda m, x, i=i, to=streams[which]: to.update({i: x[0]}))
            layer.register_forward_hook(lambda m, x, y, i=i, to=streams[which]: to.update({i + 1: y[0]}))
            o_proj = layer.self_attn.o_proj
            o_proj.register_forward_hook(lambda m, x, y, i=i, to=inputs[which]: to.update({i: x[0]}))
            o_proj.register_forward_hook(lambda m, x, y, i=i, to=attended[which]: to.update({i: y}))
        reference(ids)
    assert set(seen) == set(range(1, last + 1))
    for layer, found in seen.items():
        for stream, expected in zip(found, streams, strict=True):
            assert_near(stream.double(), expected[layer], 1e3 * EPS, f"layer {layer}")

    held = torch.arange(len(sample)) % HELD_OUT == HELD_OUT - 1
    strengths = []
    for layer, at in enumerate(report["layers"]):
        before, after = (stream[layer] for stream in streams)
        wanted = attended[0][layer]
        if config.attention_skip and config.norm_placement == "before":
            wanted = wanted + (before - after) / config.residual_multiplier
        features = inputs[1][layer]
        if config.attention_output_bias:
            features = torch.cat((features, torch.ones_like(features[..., :1])), -1)
        weight = (before.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()
        parts = [
            ((features * weight)[rows].flatten(0, 1), (wanted * weight)[rows].flatten(0, 1)) for rows in (~held, held)
        ]
        stored = sweeps._file("pairs", layer)
        pairs = [pair for pair in pairs_in(stored, layer) if list(pair.heads) in at["merged"]]
        output, strength, missed = fit_by_hand(parts, merge_heads(*model, layer, pairs).output)
        assert at["layer"] == layer and at["missed"] == pytest.approx(missed, rel=1e-3, abs=EPS)
        if missed > EPS:
            assert at["ridge"] == strength
            strengths.append(strength)
            rows = output[: features.shape[-1] - config.attention_output_bias]
            assert_near(converted[f"model.layers.{layer}.self_attn.o_proj.weight"].double(), rows.T, 1e-3)
            if config.attention_output_bias:
                bias = converted[f"model.layers.{layer}.self_attn.o_proj.bias"].double()
                assert_near(bias, output[-1], 1e-3)
    assert set(strengths) - {None}


def pairs_in(file: Path, layer: int) -> Iterator[Pair]:
    return iter(_pairs(load_file(file), layer))


@torch.no_grad()
def test_the_cost_is_what_merging_loses(tmp_path: Path) -> None:
    """Of every pair in every layer, from the model's own patterns: the mean over both heads' patterns."""
    model = source("llama", **SMALL, num_key_value_heads=2)
    config, sample = model[0], sample_of(model[0], 4, 6)
    streams, values, patterns = seen_by_hooks(model, sample)
    sweeps = merging(model, sample, tmp_path)
    sweeps.run()
    width, group = config.head_dim, 2
    for i in range(config.num_hidden_layers):
        (pair,) = pairs_in(sweeps._file("pairs", i), i)
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


def test_sinks_are_reported(tmp_path: Path) -> None:
    """Those of the held-out sequences, from which what is missed at them is measured."""
    config, tensors = source("llama", **SMALL)
    tensors["model.embed_tokens.weight"][5] *= 1e3
    sample = sample_of(config, 8)
    sample[sample == 5] = 6
    assert all("sink_tokens" not in at for at in merge((config, tensors), sample, tmp_path / "none")[2]["layers"])
    sample[1, 0] = 5
    assert "sink_tokens" not in merge((config, tensors), sample, tmp_path / "fitted")[2]["layers"][1]
    sample[3, 0] = sample[7, 4] = 5
    at = merge((config, tensors), sample, tmp_path / "held out")[2]["layers"][1]
    assert at["sink_tokens"] == 2 and 0 < at["missed_sinks"] < 1.5


def test_a_zero_embedding_does_not_outweigh_all_others(tmp_path: Path) -> None:
    config, tensors = source("llama", **SMALL)
    sample = sample_of(config, 16)
    sample[sample == 5] = 6
    expected = merge((config, tensors), sample, tmp_path / "without")
    costs = [pair.cost for pair in pairs_in(tmp_path / "without" / "pairs-0.safetensors", 0)]
    tensors["model.embed_tokens.weight"][5] = 0
    sample[2, 3] = 5
    found = merge((config, tensors), sample, tmp_path / "with")
    merged = [pair.cost for pair in pairs_in(tmp_path / "with" / "pairs-0.safetensors", 0)]
    # One token of 192, whose stream is floored at 1e-3 where others have about 0.2.
    assert all(cost < 1e4 * before for before, cost in zip(costs, merged, strict=True))
    assert len(expected[2]["layers"]) == len(found[2]["layers"])


@pytest.mark.parametrize(
    "fields, factor",
    [
        ({}, 1.0),
        ({"residual_multiplier": 0.5}, 2.0),
        ({"attention_skip": False}, 0.0),
        ({"norm_placement": "after"}, 0.0),
    ],
)
def test_what_brings_a_stream_back(fields: dict, factor: float) -> None:
    first, second = normals()(2, 3, 4, 5)
    found = correction(tiny("llama", **fields), first, second)
    assert torch.equal(torch.as_tensor(found) + torch.zeros(3, 4, 5), factor * (first - second))


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
    _, _, report = merge(model, sample_of(model[0], 4), tmp_path, layers=(1, 3, 1))
    assert [len(at["merged"]) for at in report["layers"]] == [0, 2, 0, 2]


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
def test_refused(name: str, tmp_path: Path) -> None:
    match, config, ratio, layers = REFUSED[name]
    with pytest.raises(LeanError, match=match) as refusal:
        merging((config, {}), sample_of(config, 4), tmp_path, ratio=ratio, layers=layers)
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


def test_too_few_sequences_are_refused(tmp_path: Path) -> None:
    model = source("gpt", **SMALL)
    with pytest.raises(LeanError, match=r"one of 4 sequences is held out .* make 3\. Use more --tokens"):
        merge(model, sample_of(model[0], 3), tmp_path)


# --- interrupted and started again ------------------------------------------------------------------------------------

LITTLE = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 11}
JOB = {"tokens": "a", "ratio": 0.5, "layers": (0, 1)}


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def little() -> tuple[Model, np.ndarray]:
    model = source("gpt", **LITTLE)
    return model, sample_of(model[0], 8, 5)


@pytest.fixture(scope="module")
def whole(little, tmp_path_factory) -> dict[str, Tensor]:
    return dict(merge(*little, tmp_path_factory.mktemp("whole"))[1])


def assert_same(found: Any, expected: dict[str, Tensor]) -> None:
    assert dict(found).keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def stop_at(call: int) -> Callable[[Any], None]:
    calls = iter(range(call))

    def count(*_: Any) -> None:
        if next(calls, None) is None:
            raise Stop

    return count


@pytest.mark.parametrize("layer", range(6))
def test_an_interrupted_layer_is_started_again(little, whole, tmp_path: Path, layer: int) -> None:
    """The one whose message came last; those before it are not run again."""
    first, second = [], []
    with pytest.raises(Stop):
        merge(*little, tmp_path, job=JOB, message=lambda text: (first.append(text), stop_at_layer(first, layer)))
    _, converted, _ = merge(*little, tmp_path, job=JOB, message=second.append)
    assert_same(converted, whole)
    assert first[:-1] + second == [f"{phase}: layer {i} of 3" for phase in ("choosing", "fitting") for i in (1, 2, 3)]
    assert first[-1] == second[0]


def stop_at_layer(seen: list[str], layer: int) -> None:
    if len(seen) > layer:
        raise Stop


def test_interrupted_anywhere(little, whole, tmp_path: Path, monkeypatch) -> None:
    """At every pass of a batch through a block: one in each layer's first sweep and batch, two in the second."""
    for call in range(3 * 3 * 2):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(Layers, "run", stopping(Layers.run, call))
            merge(*little, tmp_path / str(call), job=JOB)
        assert_same(merge(*little, tmp_path / str(call), job=JOB)[1], whole)


def test_interrupted_again_and_again(little, whole, tmp_path: Path, monkeypatch) -> None:
    stops = 0
    while stops < 20:
        with monkeypatch.context() as patch:
            patch.setattr(Layers, "run", stopping(Layers.run, 5))
            try:
                converted = merge(*little, tmp_path, job=JOB)[1]
                break
            except Stop:
                stops += 1
    assert stops == 4
    assert_same(converted, whole)


def stopping(run: Callable, call: int) -> Callable:
    """`Layers.run`, which stops at that call."""
    stop = stop_at(call)

    def stopped(self: Layers, *arguments: Any) -> Tensor:
        stop()
        return run(self, *arguments)

    return stopped


@pytest.mark.parametrize("where", [1, 2, 7, 11])
def test_another_job_does_not_use_the_files(little, whole, tmp_path: Path, monkeypatch, where: int) -> None:
    """Nor does this one use what another has written over."""
    model, sample = little
    other = sample_of(model[0], 8, 5, seed=9)
    seen: list[str] = []
    with pytest.raises(Stop):
        merge(model, sample, tmp_path, job=JOB, message=lambda text: (seen.append(text), stop_at_layer(seen, 4)))
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Layers, "run", stopping(Layers.run, where))
        merge(model, other, tmp_path, job=JOB | {"tokens": "b"})
    assert_same(merge(model, sample, tmp_path, job=JOB)[1], whole)
    expected = dict(merge(model, other, tmp_path / "other")[1])
    assert_same(merge(model, other, tmp_path, job=JOB | {"tokens": "b"})[1], expected)
    # Without a job nothing is ever used.
    assert_same(merge(model, sample, tmp_path)[1], whole)


def damaged(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "half": content[: len(content) // 2], "all but one": content[:-1]}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "half", "all but one"])
@pytest.mark.parametrize(
    "name",
    [
        *("state.json", "pairs-0.safetensors", "pairs-2.safetensors", "merged-0.safetensors", "merged-0.json"),
        *("source0", "converted-merged0"),
    ],
)
def test_damaged_files_are_not_trusted(little, whole, tmp_path: Path, name: str, how: str) -> None:
    """What a machine that stopped may leave: the conversion starts anew."""
    seen: list[str] = []
    with pytest.raises(Stop):
        merge(*little, tmp_path, job=JOB, message=lambda text: (seen.append(text), stop_at_layer(seen, 5)))
    damaged(tmp_path / name, how)
    again: list[str] = []
    assert_same(merge(*little, tmp_path, job=JOB, message=again.append)[1], whole)
    # JSON is whole without the newline at its end.
    assert len(again) == (1 if name.endswith("json") and how == "all but one" else 6)


@pytest.mark.parametrize("done", [-1, 7, 2.5, "3", None, [1]])
def test_a_state_that_makes_no_sense(little, whole, tmp_path: Path, done: Any) -> None:
    merge(*little, tmp_path, job=JOB)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"done": done}))
    assert_same(merge(*little, tmp_path, job=JOB)[1], whole)


def test_a_finished_job_is_read(little, whole, tmp_path: Path, monkeypatch) -> None:
    merge(*little, tmp_path, job=JOB)
    monkeypatch.setattr(Layers, "run", stop_at(0))
    progress: list[tuple[int, int]] = []
    _, converted, _ = merge(*little, tmp_path, job=JOB, progress=lambda *at: progress.append(at))
    assert_same(converted, whole)
    assert progress[0] == (0, 6) and progress[-1] == (6, 6) and progress == sorted(progress)


# --- memory, disk, and the result -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, BIASES])
def test_space_is_asked_for(fields: dict, tmp_path: Path, monkeypatch) -> None:
    """For what is written but for the headers of files, and little more; nothing is written without it."""
    model = source("gpt", **fields)
    sample = sample_of(model[0], 16, 32)
    merge(model, sample, tmp_path / "written")
    streams = [file for file in (tmp_path / "written").iterdir() if not file.suffix]
    written = sum(file.stat().st_size for file in streams)
    assert {file.name for file in streams} == {
        "source0",
        "source1",
        "converted-merged0",
        "converted-merged1",
        "features-merged",
    }
    for file in (tmp_path / "written").glob("*.safetensors"):
        written += sum(tensor.nbytes for tensor in load_file(file).values())

    def start(free: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
            merging(model, sample, tmp_path / "little")

    (tmp_path / "little").mkdir()
    with pytest.raises(LeanError, match=r"needs [\d.]+ MB in .* free\. Use fewer --tokens, or choose an --out"):
        start(written - 1)
    assert not list((tmp_path / "little").iterdir())
    start(1.25 * written)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", ["source0", "converted-merged1", "features-merged"])
def test_a_full_disk_is_an_error(little, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(LeanError, match=r"the disk is full: .*; choose an --out on a larger disk"):
        merge(*little, tmp_path)


def test_a_full_disk_while_a_layer_is_saved(little, tmp_path: Path, monkeypatch) -> None:
    def full(tensors: dict[str, Tensor], file: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("leanqkv.convert.sweeps.save_file", full)
    with pytest.raises(LeanError, match=r"the disk is full: .*; choose an --out on a larger disk"):
        merge(*little, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_one_layer_is_in_memory(tmp_path: Path, monkeypatch) -> None:
    """One block at a time, and of a stream on disk one batch."""
    model = source("llama", **SMALL, num_hidden_layers=5)
    blocks: list[weakref.ref] = []
    alive, most, files = [], [], set()

    def watched(self: Layers, layer: int, block=Layers.block) -> Any:
        made = block(self, layer)
        blocks.append(weakref.ref(made))
        return made

    def ran(self: Layers, *arguments: Any, run=Layers.run) -> Tensor:
        alive.append(sum(made() is not None for made in blocks))
        return run(self, *arguments)

    def read(self: Stream, rows: slice, get=Stream.__getitem__) -> Tensor:
        found = get(self, rows)
        most.append(len(found))
        files.add(self._file.name)
        return found

    monkeypatch.setattr(Layers, "block", watched)
    monkeypatch.setattr(Layers, "run", ran)
    monkeypatch.setattr(Stream, "__getitem__", read)
    merge(model, sample_of(model[0], 16), tmp_path, batch_size=3)
    assert len(blocks) == 10 and set(alive) == {1} and max(most) == 3
    assert files == {"source0", "source1", "converted-merged0", "converted-merged1", "features-merged"}


def test_the_result_is_a_checkpoint(tmp_path: Path) -> None:
    """The same again from the same; the source is untouched; saved, loaded, generated from, decoded."""
    config, tensors = source("llama", **SMALL)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    sample = sample_of(config, 8)
    copy = sample.copy()
    target, converted, report = merge((config, tensors), sample, tmp_path / "first")
    again = merge((config, tensors), sample, tmp_path / "second")
    assert_same(again[1], dict(converted))
    assert again[0].to_dict() == target.to_dict() and again[2] == report
    assert np.array_equal(copy, sample) and all(torch.equal(before[name], tensors[name]) for name in tensors)
    for other in (1, 3, 8):  # batches decide nothing but rounding
        rows = merge((config, tensors), sample, tmp_path / f"batch{other}", batch_size=other)[0].key_value
        assert rows == target.key_value

    assert target.key_value["type"] == "borrowed_values"
    rows = target.key_value["heads"]
    assert len(rows) == 4 and all(row[0] == row[2] and row[3] < row[1] for row in rows)
    merged = {(at["layer"], *pair) for at in report["layers"] for pair in at["merged"]}
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


def test_a_recorder_goes_also_after_an_error(tmp_path: Path) -> None:
    model = source("gpt", **SMALL)
    block = merging(model, sample_of(model[0], 4), tmp_path).source.block(0)
    with pytest.raises(Stop), recording(block) as recorder:
        assert isinstance(block.self_attn.attend, Recorder) and block.self_attn.attend is recorder
        raise Stop
    assert "attend" not in vars(block.self_attn)
