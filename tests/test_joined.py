"""One product for all projections of the same input: the same numbers, the same names, and nothing passed over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens
from torch import nn

from leanqkv import LeanForCausalLM
from leanqkv.inference import joined
from leanqkv.inference.joined import join_projections
from leanqkv.model.latent import is_plain_linear, is_rewritten

CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("gpt", (), {}),
    ("gpt", (), {"attention_bias": True}),
    ("gpt", ("nonlinear-query",), {}),
    ("gpt", ("nonlinear-query:norm_in=false", "skipv1"), {"attention_bias": True}),
    ("gpt", ("nonlinear-query:anchor=linear",), {"norm_eps": 0.1}),
    ("llama", ("nonlinear-query", "gqa"), {}),
    ("gpt", ("nonlinear-query:norm_in=false", "nonlinear-key", "nonlinear-value", "skipv1"), {}),
    ("llama", ("nonlinear-key:anchor=linear", "nonlinear-value:anchor=linear", "gqa"), {"attention_bias": True}),
    ("llama", ("residual-query", "skipv1"), {"qk_norm": True}),
    ("llama", ("identity-query",), {}),
    ("llama", ("mlp-query", "keys-as-values"), {}),
    ("llama", ("mla", "skipv1", "nonlinear-query"), {"attention_bias": True}),
    ("llama", ("yoco",), {"num_hidden_layers": 4}),
    ("gpt", ("output-gate", "nonlinear-query"), {"attention_bias": True}),
    ("llama", ("output-gate:per_head=true", "mla"), {}),
    ("llama", ("output-gate", "latent-values:keys=true"), {}),
]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every joined weight that is multiplied with."""
    seen: list[int] = []

    def noted(x, weight, bias=None):
        seen.append(len(weight))
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(joined, "F", SimpleNamespace(linear=noted))
    return seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join((case[0], *case[1], *case[2])))
def test_joined_is_separate(case, products) -> None:
    """Logits and gradients, by name."""
    shape, names, overrides = case
    model = randomize(LeanForCausalLM(tiny(shape, *names, **overrides))).double()
    ids = tokens(2, 9)
    results = []
    for join in (False, True):
        if join:
            join_projections(model)
        model.zero_grad()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        results.append((output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        assert bool(products) == join
    assert len(products) >= model.config.num_hidden_layers // 2, "nothing was joined"
    (separate, gradients), (together, others) = results
    assert_near(together, separate, 1e-11)
    assert gradients.keys() == others.keys()
    # A key bias without rotary positions shifts all scores alike: its gradient is zero up to rounding.
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert_near(others[name], gradient, 1e-11, name, floor)


def test_the_nonlinear_query_is_joined_to_two_and_a_half_widths(products) -> None:
    """K, V and W_1: d + d + d / 2 (P2, section 4), where a linear query takes 3 d, and three nonlinear ones 1.5 d.

    A gate of every column adds d.
    """
    three = ("nonlinear-query", "nonlinear-key", "nonlinear-value")
    for names, rows in (
        ((), 3 * 32),
        (("nonlinear-query",), 5 * 32 // 2),
        (three, 3 * 32 // 2),
        (("output-gate",), 4 * 32),
    ):
        products.clear()
        model = LeanForCausalLM(tiny("gpt", *names))
        join_projections(model)
        model(input_ids=tokens(1, 4))
        assert set(products) == {rows}


def test_names_do_not_depend_on_it() -> None:
    model = LeanForCausalLM(tiny("llama", "nonlinear-query"))
    names = list(model.state_dict())
    assert len(join_projections(model)) == 5 * model.config.num_hidden_layers  # W_1, K, V; gate, up
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("where", ["q_proj", "q_proj.down_proj", "k_proj"])
def test_a_hook_is_not_passed_over(where: str, products) -> None:
    model = LeanForCausalLM(tiny("gpt", "nonlinear-query"))
    calls: list[str] = []
    model.get_submodule(f"model.layers.0.self_attn.{where}").register_forward_hook(lambda *_: calls.append(where))
    join_projections(model)
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
def test_an_adapter_is_not_passed_over(where: str, products) -> None:
    model = randomize(LeanForCausalLM(tiny("gpt", "nonlinear-query"))).eval()
    layer = f"model.layers.0.self_attn.{where}"
    parent, _, name = layer.rpartition(".")
    setattr(model.get_submodule(parent), name, Adapted(model.get_submodule(layer)))
    ids = tokens(2, 6)
    with torch.no_grad():
        separate = model(input_ids=ids).logits
        join_projections(model)
        assert_near(model(input_ids=ids).logits, separate, 1e-5)
    assert products, "the others are joined"


def test_a_product_made_once_joins_no_weights_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args):
        raise AssertionError("weights were joined for a single token")

    model = LeanForCausalLM(tiny("gpt")).eval()
    ids = tokens(1, 1)
    expected = model(input_ids=ids, use_cache=False).logits
    join_projections(model, lambda maps: lambda x: [nn.functional.linear(x, *one) for one in maps])
    monkeypatch.setattr(joined.torch, "cat", never)
    assert_near(model(input_ids=ids, use_cache=False).logits, expected, 1e-5)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hooked_module_is_rewritten(kind: str) -> None:
    linear = nn.Linear(2, 2)
    assert is_plain_linear(linear)
    getattr(linear, f"register_{kind}_hook")(lambda *_: None)
    assert is_rewritten(linear) and not is_plain_linear(linear)
    assert is_rewritten(SimpleNamespace(parameters=lambda recurse: [])), "what cannot be told is taken for hooked"


def test_other_ways_to_rewrite_a_module() -> None:
    class Doubled(nn.Linear):
        pass

    assert not is_plain_linear(Doubled(2, 2))
    replaced = nn.Linear(2, 2)
    replaced.forward = lambda inputs: inputs
    assert is_rewritten(replaced)

    class OtherTensor(torch.Tensor):
        pass

    other = nn.Linear(2, 2)
    other.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(OtherTensor))
    assert is_rewritten(other)
