"""Conversion to latents: heads against loops and other optimizers, and as a whole."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from converting import BIASES, build, logits, source
from reducing import EPS, SMALL, SOURCES, Model, assert_same, normals, sample_of, sweeping, to_latents
from scipy.optimize import minimize
from shapes import assert_near, tiny, tokens
from torch import Tensor

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.convert.heads import split_heads
from leanqkv.convert.latent_values import step_of, value_latents, value_width
from leanqkv.convert.latents import Latents
from leanqkv.convert.low_rank import approximate
from leanqkv.inference import Decoder
from leanqkv.model.shapes import parameter_shapes

# --- a layer's heads --------------------------------------------------------------------------------------------------


def positive(normal: Any, size: int) -> Tensor:
    root = normal(size, 2 * size)
    return root @ root.T


@pytest.mark.long_cases
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
    # Of the layer's inputs, and ones if the keys have a bias, where keys and values have more columns.
    inputs = config.hidden_size + config.attention_bias if reads != "nothing" and columns == config.hidden_size else 0
    stored = {"gram": positive(normal, inputs or (columns if reads == "nothing" else 2 * columns))}
    stored |= {"keys.combine": combine, "keys.restore": restore, "keys.gains": torch.ones(columns).double()}
    made._measured = lambda layer: stored
    made.ranks = [columns, rank, columns]
    key_rank = columns - 4 if reads == "latent keys" else columns
    made.key_ranks = [columns, key_rank, columns]
    name = f"model.layers.{layer}.self_attn"
    weight, bias = tensors[f"{name}.v_proj.weight"], tensors.get(f"{name}.v_proj.bias")
    key = tensors[f"{name}.k_proj.weight"]
    key_bias = tensors.get(f"{name}.k_proj.bias", torch.zeros(1).double())
    chosen = combine[:, :key_rank] if reads == "latent keys" else torch.eye(columns).double()
    found = made.reduce(layer)
    written = found.attention_tensors(found.output)
    normed, patterns = normal(2, 5, config.hidden_size), normal(2, config.num_attention_heads, 5, 5).softmax(-1)
    attended = SimpleNamespace(patterns=patterns, keys=slice(0, 5))

    output = split_heads(config, tensors, layer).output.mT
    gram, cached = stored["gram"], None if reads == "nothing" else chosen
    if inputs:
        of_keys = torch.cat((key, key_bias.expand(columns)[:, None]), dim=1)[:, :inputs]
        rows = torch.cat((torch.nn.functional.pad(weight, (0, inputs - config.hidden_size)), chosen.T @ of_keys))
        gram, cached = rows @ gram @ rows.T, None
    of_values = value_latents(gram, output, cached)
    first, last = of_values.combine[:, :rank], of_values.restore[:rank]
    values, held = normed @ weight.T, (normed @ key.T + key_bias) @ chosen
    made_of_keys = held @ of_values.from_keys if reads != "nothing" else 0.0
    values = made_of_keys + (values - made_of_keys) @ first @ last + (0 if bias is None else bias)
    by_head, group = values.split(width, dim=-1), config.num_attention_heads // heads
    features = [patterns[:, query] @ by_head[query // group] for query in range(config.num_attention_heads)]
    features += [torch.ones(2, 5, 1).double()] * config.attention_output_bias
    assert_near(found.features(normed, attended), torch.cat(features, dim=-1), 1e-12)
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
    assert_near(kept.features(normed, attended)[..., :width], patterns[:, 0] @ values[..., :width], 1e-13)


# --- nothing is lost where nothing need be ----------------------------------------------------------------------------


def with_narrow_values(config: LeanConfig, tensors: dict[str, Tensor], ranks: list[int]) -> Model:
    """The same model with values of these ranks; their biases stay, and take no column."""
    result, normal = dict(tensors), normals(7)
    for layer, rank in enumerate(ranks):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        result[name] = 0.2 * normal(len(result[name]), rank) @ normal(rank, config.hidden_size) / rank**0.5
    return config, result


def as_if_rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that are off by as much as float32 is, which without skips moves the logits more than with them."""
    normal = normals(1)
    return {name: tensor * (1 + EPS / 2 * normal(*tensor.shape)) for name, tensor in tensors.items()}


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
    # As many tokens as leave no direction of the values rare: what hardly any token has is lost for the others.
    drawn = sample_of(config, 64)
    found = to_latents(model, drawn, tmp_path, share, keys=False, separate=True, batch_size=12)
    assert [at["rank"] for at in found.layers] == ranks
    assert all(at["missed"] < EPS for at in found.layers)
    assert found.config.plan.kv_bytes_per_token(torch.bfloat16) == pytest.approx(share * source_bytes, rel=1e-12)
    for ids in (torch.from_numpy(drawn), tokens(2, 12, config.vocab_size)):
        expected, another = logits(*model, ids), logits(config, as_if_rounded(model[1]), ids)
        rounding = (another - expected).abs().max() / expected.abs().max()
        assert_near(logits(found.config, found.tensors, ids), expected, 32 * float(rounding))


@pytest.mark.parametrize("placement", ["after", "both"])
def test_the_size_of_an_output_that_a_norm_undoes_chooses_nothing(placement: str, tmp_path: Path) -> None:
    """As in Gemma 3 and OLMo 2: a W_O of a hundredth of the size is the same function."""
    config, tensors = source("llama", **SMALL, norm_placement=placement, norm_eps=1e-12, num_hidden_layers=3)
    name, sample, found = "model.layers.1.self_attn.o_proj.weight", sample_of(config, 64), []
    for factor in (1, 0.01):
        scaled = {**tensors, name: factor * tensors[name]}
        result = to_latents((config, scaled), sample, tmp_path / str(factor), 0.8)
        chosen = [(one["key_rank"], one["rank"]) for one in result.layers]
        found.append((chosen, logits(result.config, result.tensors, torch.from_numpy(sample[:4]))))
    assert found[0][0] == found[1][0]
    assert_near(found[0][1], found[1][1], 1e-3)


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
    "norms of heads": ("llama", ("gqa",), {"qk_norm": True, "attention_bias": True}),
    "a norm of all heads": ("llama", (), {"qk_norm": "width"}),
}


@pytest.mark.parametrize("separate, unrotated", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", WITH_KEYS)
def test_the_result_is_what_was_fitted(name: str, separate: bool, unrotated: bool, tmp_path: Path) -> None:
    """The source with the keys and values of the fit written out, and the result with its latents: the same logits."""
    shape, mechanisms, fields = WITH_KEYS[name]
    model = source(shape, *mechanisms, **fields)
    config, keys_stay = model[0], fields.get("qk_norm") and not unrotated
    share = 0.8 if keys_stay else 0.55 if "gqa" in mechanisms else 0.45
    chosen = Latents(*model, share, separate=separate, unrotated=unrotated)
    (found,) = sweeping(model, sample_of(config, 16), tmp_path, [chosen]).run()
    assert min(chosen.ranks) < chosen.width and (min(chosen.key_ranks) == chosen.width) == bool(keys_stay)
    turned = [layer.key.before_rotary for layer in found.config.plan.layers]
    could = [layer.rope is not None and layer.window is None for layer in config.plan.layers]
    assert any(turned) == (unrotated and any(could)) and not any(
        t and not c for t, c in zip(turned, could, strict=True)
    )
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


def test_less_is_lost_by_what_the_keys_norm_lets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than by keys as they are before it, where it takes most of some columns away."""
    config, tensors = source("llama", qk_norm=True)
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn.k_norm.weight"
        tensors[name] = 4 * torch.linspace(0, 1, config.head_dim, dtype=torch.float64).square()
    ids, errors = tokens(4, 12, config.vocab_size), []
    for given in ("with", "without"):
        if given == "without":
            monkeypatch.setattr("leanqkv.convert.latents.key_norm", lambda *_: None)
        found = to_latents((config, tensors), sample_of(config, 32), tmp_path / given, 0.5, unrotated=True)
        errors.append(float((logits(found.config, found.tensors, ids) - logits(config, tensors, ids)).square().mean()))
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("norm", [True, "width"])
def test_nothing_is_lost_where_normed_keys_stay_whole(norm: bool | str, tmp_path: Path) -> None:
    """Values are made of what keys are before their norm, and so a latent of all their columns is cached."""
    config, tensors = source("llama", "gqa", qk_norm=norm)
    width, layers = value_width(config), config.num_hidden_layers
    rank = step_of(width)
    model = with_narrow_values(config, tensors, [rank] * layers)
    found = to_latents(model, sample_of(config, 64), tmp_path, (width + rank) / (2 * width), unrotated=True)
    assert [(at["key_rank"], at["rank"], at["from_keys"]) for at in found.layers] == [(width, rank, True)] * layers
    assert all(layer.key.before_rotary and layer.key_rank == width for layer in found.config.plan.layers)
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
    assert {name: tuple(found.tensors[name].shape) for name in found.tensors} == parameter_shapes(target)
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
    "too little": ("from 25% of its cache .* `cache=20%` is out of reach. For less", tiny("llama"), 0.2, None),
    "too little where keys are normed": (
        "from 62.5% of its cache .* For less, take unrotated-latents, which reduce normed keys too, or quantize",
        tiny("llama", qk_norm=True),
        0.4,
        None,
    ),
    "too little of one layer": ("from 75% of its cache", tiny("llama"), 0.74, (1,)),
    "none": ("`cache=0%` is out", tiny("llama"), 0.0, None),
    "all": ("`cache=100%` is out", tiny("llama"), 1.0, None),
    "more than all": ("`cache=150%` is out", tiny("llama"), 1.5, None),
    "negative": ("`cache=-5%` is out", tiny("llama"), -0.05, None),
    "no number": ("`cache=nan%` is out", tiny("llama"), float("nan"), None),
    "infinite": ("`cache=inf%` is out", tiny("llama"), float("inf"), None),
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
