"""Eliminated models on disk: certificates, damage, loading without this package."""

import copy
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_models import BIASES, IDS, ROUNDING, SKIPLESS, build, logits, relative, small, weights
from safetensors.torch import load_file
from torch import Tensor

from leanqkv import LeanConfig, LeanError, LeanForCausalLM, count_parameters, kv_bytes_per_token
from leanqkv.checkpoints.tensors import LazyTensors
from leanqkv.eliminate import certify, eliminate, eliminate_directory, elimination, parse_request, transform, verify
from leanqkv.eliminate.certify import logits as logits_of
from leanqkv.eliminate.transform import Transformed
from leanqkv.model.shapes import parameter_shapes

CASES: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "one query": (BIASES, "query", 1),
    "all queries, tied": ({"mlp_skip": False, **BIASES}, "query", None),
    "query and output": ({**SKIPLESS, **BIASES}, "query,output", None),
    "parallel output": ({**SKIPLESS, "block_type": "parallel"}, "output", None),
    "shared block": ({"num_hidden_groups": 1, "tie_word_embeddings": False}, "value", None),
    "dynamic streams": ({"hyper_connections": {"type": "hyper", "streams": 2}}, "query", 1),
    "mHC": ({"hyper_connections": {"type": "hyper", "streams": 2, "mode": "mhc"}, **BIASES}, "output", 0),
    "blocks": ({"norm_type": "rmsnorm", "key_value": {"type": "first_layer_values"}}, "block-diagonal", None),
    "rotary blocks": (
        {"position_embedding_type": "rope", "rope_parameters": {"partial_rotary_factor": 0.5}, **BIASES},
        "block-diagonal",
        None,
    ),
    "one head": ({"num_attention_heads": 1, "norm_type": "layernorm", **BIASES}, "single-head", None),
}


def model_of(config: LeanConfig, dtype: torch.dtype = torch.float32) -> LeanForCausalLM:
    return build(config, weights(config)).to(dtype)


def saved(directory: Path, config: LeanConfig, dtype: torch.dtype = torch.float32) -> Path:
    model_of(config, dtype).save_pretrained(directory)
    return directory


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_certificate(case: str, tmp_path: Path) -> None:
    fields, remove, layer = CASES[case]
    config = small(**fields)
    source = saved(tmp_path / "source", config)
    before = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    returned = eliminate_directory(source, tmp_path / "out", parse_request(remove, layer), dtype=torch.float64)
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate == json.loads(json.dumps(returned))
    file = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert certificate["weights_sha256"] == hashlib.sha256(file).hexdigest()
    assert hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest() == before

    after = LeanForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).config
    assert certificate["removed"] == remove.split(",")
    assert certificate["parameters"] == {
        "before": count_parameters(config).total,
        "after": count_parameters(after).total,
    }
    assert certificate["parameters"]["after"] == sum(tensor.numel() for tensor in stored(tmp_path / "out").values())
    assert certificate["kv_bytes_per_token_bf16"] == {
        "before": kv_bytes_per_token(config),
        "after": kv_bytes_per_token(after),
    }
    limit = ROUNDING * max([1.0, *certificate["conditions"].values()])
    assert 0 <= certificate["exact"]["relative"] <= limit
    assert certificate["exact"]["agreement"] == 1
    # Stored in float64, nothing more is lost; in other dtypes about as much as the original loses.
    assert certificate["dtypes"]["fp64"]["result"]["relative"] <= limit
    assert certificate["dtypes"]["fp64"]["original"]["relative"] == 0
    for name in ("fp32", "bf16"):
        for which in ("original", "result"):
            assert all(math.isfinite(value) for value in certificate["dtypes"][name][which].values())
    assert certificate["dtypes"]["fp32"]["result"]["relative"] <= 1e9 * limit
    assert certificate["dtypes"]["bf16"]["result"]["relative"] > certificate["dtypes"]["fp32"]["result"]["relative"] > 0


@pytest.mark.long_cases
@pytest.mark.parametrize("case", CASES)
def test_in_memory_as_in_a_directory(case: str, tmp_path: Path) -> None:
    """The same tensors, and the model that was given is left as it was."""
    fields, remove, layer = CASES[case]
    model = model_of(small(**fields))
    model.generation_config.repetition_penalty = 1.5
    state, settings = copy.deepcopy(model.state_dict()), model.config.to_dict()
    eliminated = eliminate(model, remove, layer)
    assert model.config.to_dict() == settings
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    model.save_pretrained(tmp_path / "source")
    certificate = eliminate_directory(tmp_path / "source", tmp_path / "out", parse_request(remove, layer))
    for name, tensor in stored(tmp_path / "out").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(eliminated.model.state_dict()[name], tensor), name
    assert eliminated.certificate["conditions"] == certificate["conditions"]
    assert eliminated.certificate["exact"] == certificate["exact"]
    again = eliminate(tmp_path / "source", remove, layer)
    assert again.certificate["exact"] == certificate["exact"]
    for model in (again.model, eliminated.model):
        assert model.generation_config.repetition_penalty == 1.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_in_less_is_certified_as_less(dtype: torch.dtype) -> None:
    """The figures of the stored weights are those of a model that has them."""
    config = small(mlp_skip=False)
    model = model_of(config)
    ids = {"input_ids": IDS}
    eliminated = eliminate(model, "query", dtype=dtype, inputs=ids)
    assert {parameter.dtype for parameter in eliminated.model.parameters()} == {dtype}
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(**ids).logits
        error = relative(copy.deepcopy(eliminated.model).double()(**ids).logits, wanted)
    reported = eliminated.certificate["dtypes"]["fp64"]["result"]["relative"]
    assert reported == pytest.approx(error, rel=1e-3, abs=1e-14)
    assert eliminated.certificate["exact"]["relative"] <= ROUNDING * max(eliminated.certificate["conditions"].values())
    if dtype != torch.float64:
        assert reported > torch.finfo(dtype).eps / 10


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(change: Callable[[str, Tensor], Tensor]) -> Callable[..., Transformed]:
    """`transform` that gets one tensor wrong: `change` is given every tensor's name and values."""

    def wrong(*args: Any) -> Transformed:
        result = transform(*args)
        shapes = parameter_shapes(result.config)
        return replace(result, tensors=LazyTensors(shapes, lambda name: change(name, result.tensors[name])))

    return wrong


@pytest.mark.parametrize("limit", [certify.RECOMPUTED, 0])
@pytest.mark.parametrize("stock", [False, True])
def test_a_wrong_result_is_not_written(
    stock: bool, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were an elimination wrong in one number, there would be no certificate and no checkpoint."""

    def one_off(name: str, tensor: Tensor) -> Tensor:
        if name == "model.layers.1.mlp.down_proj.weight":
            tensor = tensor.clone()
            tensor[2, 3] += 1e-3
        return tensor

    monkeypatch.setattr(certify, "RECOMPUTED", limit)
    monkeypatch.setattr(elimination, "transform", damaged(one_off))
    config = small(norm_type="layernorm", norm_bias=True, tie_word_embeddings=False, **BIASES)
    source = saved(tmp_path / "source", config)
    said = f"^the {'' if limit else 'stored '}result is not the same function"
    with pytest.raises(LeanError, match=said):
        eliminate(source, "block-diagonal")
    with pytest.raises(LeanError, match=said):
        eliminate_directory(source, tmp_path / "out", parse_request("block-diagonal"), stock=stock)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


HEAD_DIM = 4
MISTAKES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "two heads of W_O swapped": (
        "1.self_attn.o_proj.weight",
        lambda w: torch.cat((w[:, HEAD_DIM : 2 * HEAD_DIM], w[:, :HEAD_DIM], w[:, 2 * HEAD_DIM :]), dim=1),
    ),
    "W_O transposed": ("1.self_attn.o_proj.weight", lambda w: w.T),
    "W_K transposed": ("0.self_attn.k_proj.weight", lambda w: w.T),
    "no bias of W_Q": ("1.self_attn.q_proj.bias", torch.zeros_like),
    "no bias of W_O": ("0.self_attn.o_proj.bias", torch.zeros_like),
    "no bias of the MLP": ("0.mlp.up_proj.bias", torch.zeros_like),
}


def possible_mistakes(case: str) -> list[str]:
    """Of tensors that the result has, and where they can be transposed."""
    fields, remove, layer = CASES[case]
    config = small(**fields)
    shapes = parameter_shapes(transform(config, weights(config), parse_request(remove, layer)).config)
    found = {mistake: shapes.get(f"model.layers.{name}") for mistake, (name, _) in MISTAKES.items()}
    swaps = config.num_attention_heads > 1
    return [mistake for mistake, shape in found.items() if shape in ((12,), (20,)) or (shape == (12, 12) and swaps)]


@pytest.mark.parametrize("case, mistake", [(case, mistake) for case in CASES for mistake in possible_mistakes(case)])
def test_mistakes_are_found_without_solving_twice(case: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the stored result is compared, as of large models: in float32 it is further off than by rounding."""
    fields, remove, layer = CASES[case]
    name, change = MISTAKES[mistake]
    monkeypatch.setattr(certify, "RECOMPUTED", 0)
    monkeypatch.setattr(elimination, "transform", damaged(lambda of, t: change(t) if of.endswith(name) else t))
    with pytest.raises(LeanError, match=r"the stored result is not the same function: .* rounding to float32 explains"):
        eliminate(model_of(small(**fields)), remove, layer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_right_is_certified_without_solving_twice(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, remove, layer = CASES[case]
    model, passes = model_of(small(**fields)), []
    monkeypatch.setattr(certify, "logits", lambda *given: passes.append(given[-1]) or logits_of(*given))
    for limit in (certify.RECOMPUTED, 0):
        monkeypatch.setattr(certify, "RECOMPUTED", limit)
        passes.clear()
        certificate = eliminate(model, remove, layer, dtype=dtype).certificate
        assert (certificate["exact"] is None) == (limit == 0)
        assert len(passes) == 6 + (limit > 0)
        rounding = certificate["rounding"]
        assert 0 < rounding["distance"] <= rounding["explained"] <= max(certify.EXACT, 200 * torch.finfo(dtype).eps)


def test_logits_beyond_the_dtype_are_not_certified() -> None:
    """Weights that float32 holds, of a function that it cannot compute."""
    model = model_of(small(tie_word_embeddings=False), torch.float64)
    with torch.no_grad():
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            model.get_parameter(name).mul_(1e25)
    assert eliminate(model, "query", 1, dtype=torch.float64).certificate["exact"]["relative"] <= certify.EXACT
    with pytest.raises(LeanError, match="computed in fp32 are not finite; store it in a wider dtype"):
        eliminate(model, "query", 1)


def test_verify_is_measured_plainly(tmp_path: Path) -> None:
    """Every figure, against logits of plainly built models."""
    one, other = small(), small(norm_type="rmsnorm")
    first, second = saved(tmp_path / "one", one, torch.float64), saved(tmp_path / "other", other, torch.float64)
    measured = verify(first, second, {"input_ids": IDS})["fp64"]["result"]
    wanted, got = (logits(config, weights(config)).flatten(0, 1) for config in (one, other))
    assert measured["max_abs"] == pytest.approx((got - wanted).abs().max().item(), rel=1e-9)
    assert measured["relative"] == pytest.approx(relative(got, wanted), rel=1e-9)
    p, q = wanted.log_softmax(-1), got.log_softmax(-1)
    assert measured["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-9)
    assert measured["agreement"] == pytest.approx((wanted.argmax(-1) == got.argmax(-1)).double().mean().item())
