"""One product for all projections of the same input: the same numbers, and nothing passed over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch import nn

from leanqkv import LeanForCausalLM
from leanqkv.model import fused

CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("gpt", (), {}),
    ("gpt", (), {"attention_bias": True}),
    ("gpt", ("nonlinear-query",), {}),
    ("gpt", ("nonlinear-query:norm_in=false", "skipv1"), {"attention_bias": True}),
    ("gpt", ("nonlinear-query:anchor=linear",), {"norm_eps": 0.1}),
    ("llama", ("nonlinear-query", "gqa"), {}),
    ("llama", ("residual-query", "skipv1"), {"qk_norm": True}),
    ("llama", ("identity-query",), {}),
    ("llama", ("mlp-query", "keys-as-values"), {}),
    ("llama", ("mla", "skipv1", "nonlinear-query"), {"attention_bias": True}),
    ("llama", ("yoco",), {"num_hidden_layers": 4}),
]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fuses from the first token on, and notes the rows of every joined weight."""
    monkeypatch.setattr(fused, "MIN_TOKENS", 1)
    seen: list[int] = []

    def noted(x, weight, bias=None):
        seen.append(len(weight))
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(fused, "F", SimpleNamespace(linear=noted))
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join((case[0], *case[1], *case[2])))
def test_fused_is_unfused(case, products) -> None:
    shape, names, overrides = case
    model = randomize(LeanForCausalLM(tiny(shape, *names, **overrides))).double()
    ids = tokens(2, 9)
    results = {}
    for fuse in (True, False):
        model.config.fuse_projections = fuse
        model.zero_grad()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        results[fuse] = output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}
        if not fuse:
            continue
        assert len(products) >= model.config.num_hidden_layers // 2, "nothing was fused"
    assert_near(results[True][0], results[False][0], 1e-11)
    # A key bias without rotary positions shifts all scores alike: its gradient is zero up to rounding.
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in results[False][1].values())
    for name, gradient in results[False][1].items():
        assert_near(results[True][1][name], gradient, 1e-11, name, floor)


def test_the_nonlinear_query_is_fused_to_two_and_a_half_widths(products) -> None:
    """K, V and W_1: d + d + d / 2 (P2, section 4), where a linear query takes 3 d."""
    for names, rows in (((), 3 * 32), (("nonlinear-query",), 5 * 32 // 2)):
        products.clear()
        LeanForCausalLM(tiny("gpt", *names))(input_ids=tokens(1, 4))
        assert set(products) == {rows}


def test_names_and_configuration_do_not_depend_on_it() -> None:
    on, off = (LeanForCausalLM(tiny("gpt", "nonlinear-query", fuse_projections=fuse)) for fuse in (True, False))
    assert on.state_dict().keys() == off.state_dict().keys()


@pytest.mark.parametrize("where", ["q_proj", "q_proj.down_proj", "k_proj"])
def test_a_hook_is_not_passed_over(where: str, products) -> None:
    model = LeanForCausalLM(tiny("gpt", "nonlinear-query"))
    calls: list[str] = []
    model.get_submodule(f"model.layers.0.self_attn.{where}").register_forward_hook(lambda *_: calls.append(where))
    model(input_ids=tokens(1, 4))
    assert calls == [where]


class Adapted(nn.Module):
    """What adapter libraries put in a layer's place."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base_layer = base

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_layer, name)

    def forward(self, x):
        return self.base_layer(x) + 1


@pytest.mark.parametrize("where", ["q_proj", "q_proj.down_proj", "v_proj"])
def test_an_adapter_is_not_passed_over(where: str, products, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(LeanForCausalLM(tiny("gpt", "nonlinear-query"))).eval()
    layer = f"model.layers.0.self_attn.{where}"
    parent, _, name = layer.rpartition(".")
    setattr(model.get_submodule(parent), name, Adapted(model.get_submodule(layer)))
    ids = tokens(2, 6)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        model.config.fuse_projections = False
        assert_near(found, model(input_ids=ids).logits, 1e-5)


def test_a_decoding_step_joins_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args):
        raise AssertionError("weights were joined for a single token")

    model = LeanForCausalLM(tiny("gpt")).eval()
    monkeypatch.setattr(fused.torch, "cat", never)
    model(input_ids=tokens(1, 1), use_cache=False)
