"""Attention in one call, as vLLM without the plugin wants it: the same function, or refused by name."""

import ast
import inspect
import textwrap
from copy import deepcopy

import pytest
import torch
from product.mechanisms import CASES
from shapes import assert_near, tokens
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leanqkv.model.attention import VLLM, OneCallAttention
from leanqkv.model.registry import ConfigError
from leanqkv.model.transformer import LeanModel

RUNS = (
    *("baseline", "gqa", "mqa", "identity-query", "nonlinear-query", "residual-query", "mlp-query", "identity-key"),
    *("nonlinear-key", "nonlinear-value", "biases and qk_norm", "parallel", "moe", "no-output", "denseformer"),
    *("output-gate", "output-gate:per_head=true"),
)
REFUSED = {
    "skipv1": "'first_layer_values'",
    "cla": "'shared_adjacent'",
    "resformer": "'interpolated_values'",
    "latent-values": "'latent'",
    "latent-keys+nonlinear-value": "'latent'",
    "keys-as-values": "'keys'",
    "mla": "'kv_lora_rank'",
    "sliding_window": "sliding_window",
    "shared blocks": "several layers share a block",
}


@pytest.fixture
def interface(monkeypatch):
    """An attention implementation of vLLM's name, and the scales that it is called with."""
    scales: list[float] = []

    def attend(module, *heads, scaling, **kwargs):
        scales.append(scaling)
        output, _ = sdpa_attention_forward(module, *heads, scaling=scaling, is_causal=True)
        return output[0].flatten(1), None  # without a batch, as vLLM's

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, VLLM, attend)
    return scales


def model_of(name: str):
    return next(case for case in CASES if case.name == name).model()


@torch.no_grad()
@pytest.mark.parametrize("name", RUNS)
def test_one_call_is_the_same_function(name: str, interface) -> None:
    plain = model_of(name)
    config = deepcopy(plain.config)
    config._attn_implementation = VLLM
    model = LeanModel(config).double().eval()
    model.load_state_dict(plain.model.state_dict())
    ids = tokens(1, 12)
    expected = plain.model(input_ids=ids, use_cache=False).last_hidden_state
    assert_near(model(input_ids=ids, use_cache=False).last_hidden_state, expected, 1e-12)
    assert interface == [layer.attention_scale(layer.layer) for layer in config.plan.layers]
    assert [block.self_attn.scaling for block in model.layers] == interface


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_plugin_is_refused(name: str, interface) -> None:
    config = model_of(name).config
    config._attn_implementation = VLLM
    with pytest.raises(ConfigError, match=f"without the plugin leanqkv-vllm: .*{REFUSED[name]}"):
        LeanModel(config)


def test_vllm_finds_the_call() -> None:
    """It looks for one call of a name that is bound to an entry of ALL_ATTENTION_FUNCTIONS, and for its scale."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(OneCallAttention.forward)))
    bound = [node.targets[0].id for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_lookup(node.value)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") in bound]
    assert [ast.unparse(word.value) for word in calls[0].keywords if word.arg == "scaling"] == ["self.scaling"]
    assert len(bound) == len(calls) == 1


def _is_lookup(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("ALL_ATTENTION_FUNCTIONS.")
