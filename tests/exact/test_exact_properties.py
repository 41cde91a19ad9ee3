"""Random architectures, random requests: an elimination is exact and what was removed is gone, or it is refused."""

import random
from collections import Counter

import pytest
import torch
from exact_models import (
    BIASES,
    IDS,
    borrowing_config,
    build,
    elements,
    logits,
    random_config,
    relative,
    small,
    tolerance,
    weights,
)
from expected_eliminations import removed, weights_fewer

from leanqkv import ConfigError, LeanConfig, LeanError, LeanForImageClassification
from leanqkv.checkpoints.dense import to_dense
from leanqkv.eliminate import certify, eliminate, parse_request, single_head, transform
from leanqkv.eliminate.block_diagonal import eligible
from leanqkv.model.shapes import parameter_shapes
from leanqkv.presets.edit import with_fields

PARTLY_ROTARY = {"position_embedding_type": "rope", "rope_parameters": {"partial_rotary_factor": 0.5}}

REQUESTS = (
    *("query", "query", "key", "value", "output", "query,output", "key,output", "value,output", "query,value"),
    *("block-diagonal", "block-diagonal", "single-head"),
)
CASES = range(320)


def draw_case(seed: int) -> tuple[LeanConfig, str, tuple[int, ...] | None, bool]:
    draw = random.Random(seed)
    config = random_config(draw)
    remove = draw.choice(REQUESTS)
    if remove == "single-head" and config.num_attention_heads > 1 and draw.random() < 0.8:
        while config.num_attention_heads > 1:
            config = random_config(draw)
    layers = None
    if remove not in ("block-diagonal", "single-head") and draw.random() < 0.6:
        some = range(config.num_hidden_layers)
        layers = tuple(sorted(draw.sample(some, min(len(some), draw.choice((1, 1, 2))))))
    return config, remove, layers, draw.random() < 0.5


@pytest.mark.parametrize("seed", CASES)
def test_exact_or_refused(seed: int) -> None:
    check(seed, *draw_case(seed))


@pytest.mark.parametrize("seed", range(80))
def test_exact_or_refused_with_borrowed_values(seed: int) -> None:
    """A value head is used in several places: of several layers, or of one."""
    draw = random.Random(seed)
    config, (_, remove, layers, balance) = borrowing_config(draw), draw_case(seed)
    remove = draw.choice((remove, "block-diagonal", "output", "value"))
    if remove == "block-diagonal" or any(layer >= config.num_hidden_layers for layer in layers or ()):
        layers = None
    check(seed, config, remove, layers, balance)


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("per_head", [False, True], ids=["columns", "heads"])
def test_exact_or_refused_with_a_gate(per_head: bool, seed: int) -> None:
    config, remove, layers, balance = draw_case(seed)
    check(seed, with_fields(config, output_gate={"type": "sigmoid", "per_head": per_head}), remove, layers, balance)


@pytest.mark.parametrize("per_head", [False, True], ids=["columns", "heads"])
def test_a_gate_is_read_in_another_basis(per_head: bool) -> None:
    """What a change of basis inside the heads asks for goes with a number for each head, and not for each column."""
    gate = {"type": "sigmoid", "per_head": per_head}
    for remove in ("query", "key", "value", "output", "query,output", "value,output", "block-diagonal"):
        check(0, small(attention_skip=False, mlp_skip=False, output_gate=gate, **BIASES), remove, None, balance=True)
    for biases in ({}, BIASES, {"attention_bias": True}, {"attention_output_bias": True}):
        check(1, small(num_attention_heads=1, output_gate=gate, **biases), "single-head", None, balance=True)
    reasons = [
        single_head.why_not(small(num_attention_heads=1, output_gate=gate)),
        *eligible(small(output_gate=gate), "values")[1].values(),
    ]
    assert reasons == [None] if per_head else all("output_gate" in str(reason) for reason in reasons)


@pytest.mark.parametrize("remove", ["query", "key", "query,output"])
def test_latent_values_are_read_in_another_basis(remove: str) -> None:
    """The basis of the stream changes, and with it the matrix that makes the latent of it."""
    config = small(attention_skip=False, mlp_skip=False, value=[{"type": "latent", "rank": 5, "layers": [1]}])
    before = weights(config)
    result = transform(config, before, parse_request(remove))
    assert not torch.equal(
        result.tensors["model.layers.1.self_attn.v_proj.weight"], before["model.layers.1.self_attn.v_proj.weight"]
    )
    assert relative(logits(result.config, result.tensors), logits(config, before)) <= tolerance(result.conditions)
    with pytest.raises(LeanError, match=r"the value .* it is 'latent'"):
        transform(config, before, parse_request("value"))


@pytest.mark.parametrize("remove", ["query", "value", "query,output", "block-diagonal"])
@pytest.mark.parametrize("rotary", [True, False])
def test_latent_keys_are_read_in_another_basis(rotary: bool, remove: str) -> None:
    """As latent values; the heads made of them keep their basis, and so do the queries for them."""
    position = {"position_embedding_type": "rope"} if rotary else {}
    entry = {"type": "latent", "columns": [1, 2], "layers": [1]} if rotary else {"type": "latent", "layers": [1]}
    config = small(attention_skip=False, mlp_skip=False, attention_bias=True, key=[entry], **position)
    before = weights(config)
    result = transform(config, before, parse_request(remove))
    names = [f"model.layers.1.self_attn.k_{part}.weight" for part in ("proj", "up_proj")]
    kept = [torch.equal(result.tensors[name], before[name]) for name in names]
    assert kept == [remove == "block-diagonal", True]
    assert result.config.plan.layers[1].key == config.plan.layers[1].key
    assert relative(logits(result.config, result.tensors), logits(config, before)) <= tolerance(result.conditions)


@pytest.mark.parametrize("remove", ["key", "single-head"])
@pytest.mark.parametrize("position", ["rope", "none"])
def test_latent_keys_stay(position: str, remove: str) -> None:
    heads = {"num_attention_heads": 1, "head_dim": 12} if remove == "single-head" else {}
    config = small(
        **{"attention_skip": False, "mlp_skip": False, "position_embedding_type": position, **heads},
        key=[{"type": "latent"}],
    )
    with pytest.raises(LeanError, match=r"'latent'|rotary positions"):
        transform(config, weights(config), parse_request(remove))


@pytest.mark.parametrize("remove", ["query", "key", "query,output", "block-diagonal"])
@pytest.mark.parametrize("fields", [{}, BIASES, {**PARTLY_ROTARY, "attention_bias": True}], ids=str)
def test_keys_that_values_are_made_of_keep_their_basis(fields: dict, remove: str) -> None:
    """The stream they are read from may take another one; the keys of other layers may, too."""
    value = {"type": "latent", "rank": 5, "keys": True, "layers": [1]}
    config = small(attention_skip=False, mlp_skip=False, value=[value], **fields)
    before = weights(config)
    result = transform(config, before, parse_request(remove))
    assert relative(logits(result.config, result.tensors), logits(config, before)) <= tolerance(result.conditions)
    blocks, reasons = eligible(config, "keys")
    assert (list(blocks), reasons) == ([0], {1: "the values of layer 1 are made of its keys"})


@pytest.mark.parametrize("biases", [False, True])
def test_a_scale_is_not_written_into_keys_that_values_are_made_of(biases: bool) -> None:
    """An identity key's scale is of the scores alone."""
    key = {"type": "identity", "scale": 0.7, "bias": biases}
    config = small(key=[key], query=[{"type": "identity"}], value=[{"type": "latent", "keys": True, "layers": [1]}])
    before = weights(config)
    plain, tensors = to_dense(config, before)
    assert [layer.query.kind for layer in plain.plan.layers] == ["linear"] * 2
    assert relative(logits(plain, tensors), logits(config, before)) <= tolerance({})


def test_one_head_of_a_shared_output_reads_two_values() -> None:
    """Its two heads must keep one basis, so both stay, and everything else goes as in other models."""
    rows = [[0, 2, 0, 0], [1, 0, 0, 1]]
    config = small(num_hidden_groups=1, key_value={"type": "borrowed_values", "heads": rows})
    result = transform(config, weights(config), parse_request("block-diagonal"))
    assert {layer.value.kind for layer in result.config.plan.layers} == {"linear"}
    assert {layer.key.kind for layer in result.config.plan.layers} == {"block_identity"}
    for remove, layer in (("block-diagonal", None), ("query", 0), ("output", 1)):
        check(0, config, remove, None if layer is None else (layer,), balance=True)


def check(seed: int, config: LeanConfig, remove: str, layers: tuple[int, ...] | None, balance: bool) -> None:
    tensors = weights(config, seed)
    expected = weights_fewer(config, remove, layers)
    request = parse_request(remove, None if layers is None else ",".join(map(str, layers)), balance=balance)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    settings = config.to_dict()
    if expected is None:
        with pytest.raises((LeanError, ConfigError), match=r"\w+ \w+ \w+"):
            transform(config, tensors, request)
        return
    result = transform(config, tensors, request)
    shapes = {name: tuple(result.tensors[name].shape) for name in result.tensors}
    assert shapes == parameter_shapes(result.config)
    assert elements(tensors) - elements(result.tensors) == expected
    if remove not in ("block-diagonal", "single-head"):
        for slot, block in removed(config, remove.split(","), layers):
            name = f"model.layers.{block}.self_attn.{slot[0]}_proj.weight"
            assert name in tensors and name not in result.tensors
    assert relative(logits(result.config, result.tensors), logits(config, tensors)) <= tolerance(result.conditions)
    assert config.to_dict() == settings
    assert all((tensors[name] == before[name]).all() for name in before)


# Those in which rounding moved the logits furthest beside arithmetic (14, 49, 359), most of all in bfloat16 with badly
# conditioned matrices (55, 256, 1334) and with experts that rounding chooses (64, 187, 224); and others.
ROUNDED_SEEDS = (14, 49, 55, 64, 187, 224, 256, 359, 1334, *range(0, 320, 10))


@pytest.mark.parametrize("seed", [seed for seed in ROUNDED_SEEDS if weights_fewer(*draw_case(seed)[:3]) is not None])
def test_rounding_explains_what_a_right_result_is_off(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, remove, layers, balance = draw_case(seed)
    monkeypatch.setattr(certify, "RECOMPUTED", 0)
    model, layer = build(config, weights(config, seed)), None if layers is None else ",".join(map(str, layers))
    for dtype in (torch.float32, torch.bfloat16):
        rounding = eliminate(model, remove, layer, dtype=dtype, balance=balance).certificate["rounding"]
        assert 0 < rounding["distance"] <= rounding["explained"]


@pytest.mark.parametrize(
    "fields",
    [
        {"key_value": {"type": "interpolated_values", "mode": "per_token"}},
        {"key_value": {"type": "interpolated_values", "mode": "per_layer"}},
        {"key_value": {"type": "first_layer_values", "injection": "pooling"}},
        {"kv_lora_rank": 5, "position_embedding_type": "rope", "qk_rope_head_dim": 2, "attention_bias": True},
        {"kv_lora_rank": 6, "key_value": {"type": "first_layer_values"}},
        {"mlp_type": "moe", "num_local_experts": 3, "num_experts_per_tok": 2},
        {"mlp_type": "gated", "mlp_bias": True, "attention_bias": True, "attention_output_bias": True},
        {"depth_average": {"dilation": 1}, "block_type": "parallel"},
        {"value": [{"type": "keys"}], "position_embedding_type": "rope"},
        {"task": "masked_lm", "qk_norm": True, "num_hidden_groups": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_whatever_reads_or_writes_the_stream(fields: dict, tied: bool) -> None:
    """With all skips there is one basis: one weight of any layer can go, and every tensor on the stream changes."""
    config = small(num_hidden_layers=3, num_attention_heads=2, tie_word_embeddings=tied, **fields)
    tensors = weights(config)
    for remove, layer in (("query", 2), ("query", 0), ("output", 1)):
        result = transform(config, tensors, parse_request(remove, layer))
        assert elements(tensors) - elements(result.tensors) == weights_fewer(config, remove, (layer,))
        assert relative(logits(result.config, result.tensors), logits(config, tensors)) <= tolerance(result.conditions)


@pytest.mark.slow
def test_the_cases_cover_both_outcomes() -> None:
    outcomes: Counter[tuple[str, bool]] = Counter()
    for seed in CASES:
        config, remove, layers, _ = draw_case(seed)
        outcomes[remove, weights_fewer(config, remove, layers) is not None] += 1
    for remove in REQUESTS:
        assert outcomes[remove, False] >= 3, remove
        assert outcomes[remove, True] >= 3 or remove == "query,value", remove  # these two read one stream


ROUNDED: dict[str, tuple[dict, str]] = {
    "query": ({"mlp_skip": False, **BIASES}, "query"),
    "key, output": ({"attention_skip": False, "mlp_skip": False, **BIASES}, "key,output"),
    "experts": ({"mlp_skip": False, "mlp_type": "moe", "num_local_experts": 3, "num_experts_per_tok": 2}, "value"),
    "blocks": ({"norm_type": "rmsnorm", "qk_norm": True, **BIASES}, "block-diagonal"),
    "blocks, half rotated": (
        {"position_embedding_type": "rope", "rope_parameters": {"partial_rotary_factor": 0.5}, **BIASES},
        "block-diagonal",
    ),
    "blocks, a half of each half rotated": (
        {
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
            **BIASES,
        },
        "block-diagonal",
    ),
    "one head": ({"num_attention_heads": 1, "norm_type": "dyt", **BIASES}, "single-head"),
    "written out": ({"query": [{"type": "identity", "scale": 0.7}], "qk_norm": True, "norm_type": "rmsnorm"}, ""),
    "residual": ({"query": [{"type": "residual", "scale": 0.7}], **BIASES}, ""),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ROUNDED)
def test_weights_stored_in_less_are_not_rounded_again(case: str, dtype: torch.dtype) -> None:
    fields, remove = ROUNDED[case]
    config = small(**fields)
    stored = {name: tensor.to(dtype) for name, tensor in weights(config).items()}
    new, tensors = to_dense(config, stored) if not remove else (config, stored)
    conditions: dict[str, float] = {}
    if remove:
        result = transform(config, stored, parse_request(remove))
        new, tensors, conditions = result.config, result.tensors, result.conditions
    wanted = logits(config, {name: tensor.double() for name, tensor in stored.items()})
    assert relative(logits(new, tensors), wanted) <= tolerance(conditions)


@pytest.mark.parametrize(
    "remove, layer", [("query", 1), ("output", 0), ("query,output", None), ("block-diagonal", None)]
)
def test_images(remove: str, layer: int | None) -> None:
    """The patches' map and the class token write the stream, the classifier reads it."""
    skips = {"attention_skip": "," not in remove, "mlp_skip": "," not in remove}
    sizes = {"image_size": 6, "patch_size": 2, "num_channels": 2, "num_labels": 5}
    texts = dict.fromkeys(("vocab_size", "max_position_embeddings"))
    config = small(task="image_classification", **sizes, **texts, **skips, attention_bias=True)
    tensors = weights(config)
    pixels = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = transform(config, tensors, parse_request(remove, layer))
    outputs = []
    for one, state in ((config, tensors), (result.config, result.tensors)):
        model = LeanForImageClassification(one).double().eval()
        model.load_state_dict(dict(state), strict=True)
        with torch.no_grad():
            outputs.append(model(pixel_values=pixels).logits)
    assert elements(result.tensors) < elements(tensors)
    assert relative(outputs[1], outputs[0]) <= tolerance(result.conditions)


def test_a_prefix_that_sees_itself() -> None:
    config = small(mask_type="prefix", mlp_skip=False, num_key_value_heads=1)
    tensors = weights(config)
    result = transform(config, tensors, parse_request("query"))
    prefix = torch.zeros_like(IDS)
    prefix[:, :4] = 1
    with torch.no_grad():
        wanted, computed = (
            build(one, state)(input_ids=IDS, prefix_mask=prefix).logits
            for one, state in ((config, tensors), (result.config, result.tensors))
        )
    assert relative(wanted, logits(config, tensors)) > 0.01
    assert relative(computed, wanted) <= tolerance(result.conditions)
