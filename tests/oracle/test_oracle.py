"""The built model against its equations: logits and every gradient, in float64, with eager attention and sdpa."""

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch import Tensor

import leanqkv
from leanqkv import LeanConfig
from leanqkv.model.shapes import parameter_shapes

from .cases import CASES, Case
from .model import logits

TOLERANCE = 1e-10  # relative to the largest entry; float64 rounding is some 1e-14 here


def case_id(case: Case) -> str:
    shape, names, overrides = case
    return "+".join((shape, *names, *(f"{name}={value}" for name, value in overrides.items())))


def build(config: LeanConfig) -> torch.nn.Module:
    name = "LeanForMaskedLM" if config.task == "masked_lm" else "LeanForCausalLM"
    # Without norms the activations grow from layer to layer, until their exponentials overflow.
    std = 0.1 if config.norm_type == "none" else 0.3
    return randomize(getattr(leanqkv, name)(config), std).double().eval()


def gradients_of(found: Tensor, direction: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad((found * direction).sum(), list(tensors.values()))
    return dict(zip(tensors, gradients, strict=True))


def exact_angles(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles in float64: the model rounds them to float32, as transformers does, which would hide all else."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for rotary in model.model.rotary_emb.values():
        rotary.inv_freq = rotary.frequencies()[0]
        assert rotary.inv_freq.dtype == torch.float64


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_model_is_its_equations(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, names, overrides = case
    config = tiny(shape, *names, **overrides)
    model = build(config)
    ids, prefix = tokens(2, 5), None
    inputs = {"input_ids": ids}
    if config.mask_type == "prefix":
        inputs["prefix_mask"] = prefix = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 0]])
    if config.position_embedding_type == "rope":
        with torch.no_grad():
            rounded = model(**inputs).logits
        exact_angles(model, monkeypatch)
    assert set(parameter_shapes(config)) == set(dict(model.named_parameters()))
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = logits(tensors, config, ids, prefix)
    if config.position_embedding_type == "rope":
        assert_near(rounded, expected, 1e-5, "logits with rotary angles in float32")
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_gradients = gradients_of(expected, direction, tensors)
    # A key bias without rotary positions shifts all scores alike: its gradient is zero up to rounding.
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in expected_gradients.values())
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        found = model(**inputs).logits
        assert found.dtype == torch.float64
        assert_near(found, expected, TOLERANCE, f"{backend} logits")
        gradients = gradients_of(found, direction, dict(model.named_parameters()))
        for name, gradient in gradients.items():
            assert_near(gradient, expected_gradients[name], TOLERANCE, f"{backend} gradient of {name}", floor)
