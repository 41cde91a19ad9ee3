"""The built model against its equations: logits and every gradient, in float64, with eager attention and sdpa."""

from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch import Tensor

from leanqkv import LeanForCausalLM, plan
from oracle.model import logits

TOLERANCE = 1e-10  # relative to the largest entry; float64 rounding is some 1e-14 here
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
HALF_ROTARY = {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
LAYERNORM_BIAS = {"norm_type": "layernorm", "norm_bias": True}

ON_BOTH_SHAPES: list[tuple[str, ...]] = [
    (),
    ("identity-query",),
    ("identity-query:layers=0,2",),
    ("identity-query:scale=1.0",),
    ("identity-key",),
    ("identity-key:layers=1",),
    ("identity-key:scale=0.8",),
    ("identity-value",),
    ("identity-value:layers=1,2",),
    ("identity-query", "identity-key", "identity-value"),
    ("nonlinear-query",),
    ("nonlinear-query:activation=relu",),
    ("nonlinear-query:activation=relu2",),
    ("nonlinear-query:norm_in=false",),
    ("nonlinear-query:norm_out=false",),
    ("nonlinear-query:norm_in=false,norm_out=false",),
    ("nonlinear-query:rank=5",),
    ("nonlinear-query:anchor=linear",),
    ("nonlinear-query:scale=0.7",),
    ("nonlinear-query:layers=1", "identity-query:layers=0", "residual-query:layers=2"),
    ("residual-query",),
    ("residual-query:scale=0.6,layers=1,2",),
    ("skipv1",),
    ("skipv1:ratio=0.25",),
    ("skipv1:ratio=0.8",),
    ("skipv1:ratio=1.0",),
    ("skipv2",),
    ("skipv0",),
    ("skipv0:ratio=0.25",),
    ("skipv0:source_layer=1",),
    ("gqa",),
    ("mqa",),
    ("mqa", "nonlinear-query"),
    ("mqa", "skipv1:ratio=1.0"),
    ("gqa", "skipv1"),
    ("gqa", "skipv1:ratio=1.0"),
    ("gqa", "skipv2"),
    ("gqa", "skipv0"),
    ("gqa", "identity-query"),
    ("gqa", "residual-query"),
    ("gqa", "nonlinear-query", "skipv1"),
    ("identity-query", "skipv1"),
    ("identity-query", "skipv0"),
    ("identity-key", "skipv1"),
    ("identity-key", "skipv0"),
    ("identity-value", "skipv1"),
    ("identity-value", "skipv0"),
    ("identity-value:layers=0", "skipv1"),
    ("residual-query", "skipv0"),
    ("nonlinear-query", "skipv0"),
    ("nonlinear-query:anchor=linear", "gqa", "skipv0"),
]
OPTIONS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("gpt", (), BIASES | {"norm_bias": True}),
    ("gpt", (), {"attention_bias": True, "qk_norm": True}),
    ("gpt", (), {"attention_output_bias": True}),
    ("gpt", (), {"mlp_bias": True}),
    ("gpt", (), {"norm_bias": True}),
    ("gpt", (), {"norm_eps": 0.3}),
    ("gpt", (), {"position_embedding_type": "none"}),
    ("gpt", (), {"hidden_act": "relu2"}),
    ("gpt", (), {"tie_word_embeddings": False}),
    ("gpt", (), {"norm_type": "rmsnorm"}),
    ("gpt", (), {"head_dim": 6}),
    ("gpt", ("skipv1", "residual-query"), BIASES | {"norm_bias": True, "qk_norm": True}),
    ("gpt", ("skipv0",), BIASES | {"qk_norm": True}),
    ("gpt", ("nonlinear-query:anchor=linear",), BIASES | {"norm_eps": 0.3, "norm_bias": True}),
    ("gpt", ("nonlinear-query:anchor=linear", "gqa"), {"head_dim": 6}),
    ("gpt", ("skipv1:ratio=0.34",), {"hidden_size": 48, "num_attention_heads": 6}),
    ("gpt", ("gqa", "skipv1"), {"hidden_size": 48, "num_attention_heads": 8, "num_hidden_layers": 4}),
    ("gpt", ("gqa:group_size=4",), {"hidden_size": 48, "num_attention_heads": 8}),
    ("gpt", ("skipv2", "identity-query:layers=0,3"), {"num_hidden_layers": 4}),
    ("gpt", ("skipv3",), {"num_hidden_layers": 4}),
    ("gpt", ("skipv4",), {"num_hidden_layers": 5}),
    ("gpt", ("identity-query", "identity-key"), {"qk_norm": True}),
    ("llama", (), BIASES),
    ("llama", (), {"qk_norm": True, "norm_eps": 0.3}),
    ("llama", (), {"head_dim": 6}),
    ("llama", (), {"head_dim": 10, "qk_norm": True, "num_key_value_heads": 2}),
    ("llama", (), HALF_ROTARY),
    ("llama", (), {"rope_parameters": {"rope_theta": 500.0}}),
    ("llama", (), {"mlp_type": "mlp", "hidden_act": "gelu"}),
    ("llama", (), {"tie_word_embeddings": True}),
    ("llama", (), LAYERNORM_BIAS | BIASES),
    ("llama", ("skipv1", "gqa"), BIASES | {"qk_norm": True, "head_dim": 12} | HALF_ROTARY),
    ("llama", ("skipv0", "gqa"), {"attention_bias": True, "qk_norm": True}),
    ("llama", ("identity-query", "gqa"), {"qk_norm": True} | HALF_ROTARY),
    ("llama", ("identity-key", "identity-value"), BIASES | HALF_ROTARY),
    ("llama", ("residual-query", "skipv1"), BIASES | HALF_ROTARY),
    ("llama", ("nonlinear-query", "skipv1:ratio=0.75"), {"qk_norm": True, "norm_eps": 0.3}),
    ("llama", ("nonlinear-query:anchor=linear,norm_out=false", "gqa"), BIASES | {"head_dim": 6}),
]
CASES = [(shape, names, {}) for names in ON_BOTH_SHAPES for shape in ("gpt", "llama")] + OPTIONS


def case_id(case: tuple[str, tuple[str, ...], dict[str, Any]]) -> str:
    shape, names, overrides = case
    return "+".join((shape, *names, *overrides))


def gradients_of(found: Tensor, direction: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad((found * direction).sum(), list(tensors.values()))
    return dict(zip(tensors, gradients, strict=True))


def exact_angles(model: LeanForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles in float64: the model rounds them to float32, as transformers does, which would hide all else."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.frequencies()[0]
    assert rotary.inv_freq.dtype == torch.float64


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_model_is_its_equations(
    case: tuple[str, tuple[str, ...], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, names, overrides = case
    config = tiny(shape, *names, **overrides)
    model = randomize(LeanForCausalLM(config)).double().eval()
    ids = tokens(2, 5)
    if config.position_embedding_type == "rope":
        with torch.no_grad():
            rounded = model(input_ids=ids).logits
        exact_angles(model, monkeypatch)
    assert set(plan(config).parameter_shapes) == set(dict(model.named_parameters()))
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = logits(tensors, config, ids)
    if config.position_embedding_type == "rope":
        assert_near(rounded, expected, 1e-5, "logits with rotary angles in float32")
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_gradients = gradients_of(expected, direction, tensors)
    # A key bias without rotary positions shifts all scores alike: its gradient is zero up to rounding.
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in expected_gradients.values())
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        found = model(input_ids=ids).logits
        assert found.dtype == torch.float64
        assert_near(found, expected, TOLERANCE, f"{backend} logits")
        gradients = gradients_of(found, direction, dict(model.named_parameters()))
        for name, gradient in gradients.items():
            assert_near(gradient, expected_gradients[name], TOLERANCE, f"{backend} gradient of {name}", floor)
