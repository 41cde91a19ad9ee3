"""Conversion to fewer key and value heads: the mean of neighbours, against loops, and as a command."""

import json
from pathlib import Path

import pytest
import torch
from converting import BIASES, build, logits, source
from shapes import assert_near, randomize, tiny, tokens

from leanqkv import LeanError, LeanForCausalLM
from leanqkv.convert.grouped_heads import convert, ratios
from leanqkv.convert.targets import GroupedHeadsOptions
from leanqkv.frontier.points import candidates
from leanqkv.model.shapes import parameter_shapes


@pytest.mark.parametrize("ratio, kept", [(0.5, 2), (0.75, 1)])
@pytest.mark.parametrize("fields", [{}, BIASES])
def test_heads_are_the_means_of_their_neighbours(ratio: float, kept: int, fields: dict) -> None:
    config, tensors = source("llama", **{**fields, "norm_bias": False})
    width, pooled = config.head_dim, config.num_key_value_heads // kept
    target, found, _ = convert(config, tensors, GroupedHeadsOptions(ratio))
    assert target.num_key_value_heads == kept
    assert target.plan.kv_bytes_per_token(torch.float32) == (1 - ratio) * config.plan.kv_bytes_per_token(torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == parameter_shapes(target)
    for name, tensor in found.items():
        if ".k_proj." not in name and ".v_proj." not in name:
            assert torch.equal(tensor, tensors[name])
            continue
        for head in range(kept):
            for column in range(width):
                rows = [tensors[name][(head * pooled + other) * width + column] for other in range(pooled)]
                assert_near(tensor[head * width + column], sum(rows) / pooled, 1e-15)


@pytest.mark.parametrize(
    "mechanisms, fields",
    [((), {}), ((), {"qk_norm": True, "attention_bias": True}), (("output-gate",), {}), (("nonlinear-query",), {})],
)
def test_nothing_is_lost_where_neighbours_are_the_same(mechanisms: tuple[str, ...], fields: dict) -> None:
    config, tensors = source("llama", *mechanisms, **fields)
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.unflatten(0, (2, 2, config.head_dim))
            heads[:, 1] = heads[:, 0].clone()
    ids = tokens(2, 12, config.vocab_size)
    target, found, _ = convert(config, tensors, GroupedHeadsOptions(0.5))
    assert_near(logits(target, found, ids), logits(config, tensors, ids), 1e-13)


def test_shares_that_can_go() -> None:
    assert ratios(tiny("llama", num_attention_heads=6, head_dim=4)) == pytest.approx([1 / 2, 2 / 3, 5 / 6])
    assert ratios(tiny("llama", "mqa")) == []
    labels = [one.label for one in candidates(tiny("llama"), {}, {"gqa": ()})[0]]
    assert labels == ["source", "gqa, 50% of the heads", "gqa, 25% of the heads"]


REFUSED = {
    "a share of a head": (tiny("llama"), 0.3, r"`ratio` of 0\.3 cannot .* 4 key heads; a `ratio` of 0\.5 or 0\.75 is"),
    "all": (tiny("llama"), 1.0, "a `ratio` of 1 cannot"),
    "one head": (tiny("llama", "mqa"), 0.5, "1 key heads; there is nothing to pool"),
    "another key": (
        tiny("llama", "identity-key"),
        0.5,
        "the key of layer 0 is 'identity'. Only linear",
    ),
    "another value": (tiny("llama", "identity-value"), 0.5, "the value of layer 0 is 'identity'"),
    "norms of all keys": (tiny("llama", qk_norm="width"), 0.5, "normed all together"),
    "latent": (tiny("llama", "mla"), 0.5, "MLA"),
    "converted": (tiny("llama", "skipv1"), 0.5, "converted already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    config, ratio, match = REFUSED[name]
    with pytest.raises(LeanError, match=match) as refusal:
        convert(config, {}, GroupedHeadsOptions(ratio))
    assert "\n" not in str(refusal.value)


def test_convert_to_gqa(tmp_path: Path, monkeypatch, unwrapped) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny("llama")
    randomize(LeanForCausalLM(config)).save_pretrained("source")
    code, out, errors = unwrapped("convert", "source", "--to", "gqa", "--ratio", "0.75", "--out", "less")
    assert (code, errors) == (0, "") and "key and value heads pooled: [[0, 1, 2, 3]]" in out
    report = json.loads(Path("less/conversion.json").read_text())
    assert (report["to"], report["ratio"], report["pools"]) == ("gqa", 0.75, [[0, 1, 2, 3]])
    assert report["kv_bytes_per_token_bf16"][1] * 4 == report["kv_bytes_per_token_bf16"][0]
    assert "pooled to their mean, 1 in each layer" in Path("less/README.md").read_text()
    found = LeanForCausalLM.from_pretrained("less").eval()
    source_tensors = LeanForCausalLM.from_pretrained("source").state_dict()
    made, tensors, _ = convert(config, source_tensors, GroupedHeadsOptions(0.75))
    ids = tokens(1, 6)
    assert_near(found(ids).logits.double(), build(made, tensors)(ids).logits, 1e-4)
