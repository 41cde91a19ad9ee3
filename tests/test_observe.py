"""What is seen of a model's layers and heads, against the model and against loops."""

from math import sqrt

import numpy as np
import pytest
import torch
from shapes import assert_near, randomize, tiny, tokens

from experiments.analysis.probe import layer_outputs
from experiments.analysis.similarity import contributions
from leanqkv import LeanForCausalLM
from leanqkv.evaluate.observe import logit_spread, observe


def build(shape: str, *mechanisms: str, **fields) -> LeanForCausalLM:
    return randomize(LeanForCausalLM(tiny(shape, *mechanisms, **fields))).double().eval()


MODELS = [
    ("gpt", ()),
    ("gpt", ("skipv1", "nonlinear-query")),
    ("gpt", ("skipv1:injection=resformer", "identity-query")),
    ("gpt", ("denseformer", "residual-query")),
    ("gpt", ("mlp-query", "skipv0")),
    ("gpt", ("identity-query", "no-output")),
    ("llama", ("gqa:group_size=2", "skipv1")),
    ("llama", ("keys-as-values",)),
    ("llama", ("mla:rank=16,rope_dim=4", "skipv1")),
    ("llama", ("mla:rank=4,rope_dim=4",)),  # narrower than a head: attention in the absorbed form
    ("llama", ("yoco",)),
]


@pytest.mark.parametrize("shape, mechanisms", MODELS, ids=lambda value: "+".join(value) if value else "plain")
def test_what_is_observed_is_what_the_model_does(shape, mechanisms):
    """The heads' contributions add up to what attention puts out, and a layer's output is the next one's input."""
    model = build(shape, *mechanisms, num_hidden_layers=4)
    ids = tokens(2, 7)
    attended, inputs = [], []
    for block in model.model.layers:
        block.self_attn.register_forward_hook(lambda _m, _in, out: attended.append(out[0]))
        block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    before = model(input_ids=ids).logits
    implementation = model.config._attn_implementation
    attended.clear()
    inputs.clear()
    seen = observe(model, ids)
    assert model.config._attn_implementation == implementation
    assert len(seen.layers) == len(seen.heads) == len(seen.patterns) == 4
    for i, block in enumerate(model.model.layers):
        parts = contributions(block.self_attn.o_proj, seen.heads[i])
        assert_near(parts.sum(2), attended[i], 1e-10, "contributions")
        assert seen.patterns[i].shape == (2, seen.heads[i].shape[2], 7, 7)
        assert_near(seen.patterns[i].sum(-1), torch.ones(()), 1e-10, "rows of the patterns")
        assert not seen.patterns[i].triu(1).any()
        if i and "denseformer" not in mechanisms:
            assert torch.equal(seen.layers[i - 1], inputs[i])
    for one, other in zip(layer_outputs(model, ids), seen.layers, strict=True):
        assert_near(one, other, 1e-10)
    assert_near(model(input_ids=ids).logits, before, 1e-12, "the model after observing")


def test_patterns_and_heads_by_hand():
    """A plain layer, written out."""
    model = build("gpt")
    seen = observe(model, tokens(1, 5))
    block = model.model.layers[1]
    x = block.input_layernorm(seen.layers[0])[0]
    q, k, v = (getattr(block.self_attn, f"{name}_proj").weight @ x.T for name in "qkv")
    for head in range(4):
        rows = slice(8 * head, 8 * head + 8)
        for t in range(5):
            scores = torch.stack([q[rows, t] @ k[rows, s] / sqrt(8) for s in range(t + 1)])
            weights = scores.exp() / scores.exp().sum()
            assert_near(seen.patterns[1][0, head, t, : t + 1], weights, 1e-10)
            assert_near(seen.heads[1][0, t, head], v[rows, : t + 1] @ weights, 1e-10)


def test_blocks_that_share_weights_are_observed_once_a_layer():
    model = build("gpt", num_hidden_layers=4, num_hidden_groups=2)
    seen = observe(model, tokens(2, 7))
    assert len(seen.layers) == len(seen.patterns) == len(seen.heads) == 4
    assert not torch.equal(seen.layers[0], seen.layers[1])


@pytest.mark.parametrize("window", [None, 3])
def test_logit_spread_in_loops(window):
    logits = torch.randn(2, 3, 6, 6, dtype=torch.float64) * 2 + 5 * torch.randn(2, 3, 6, 1, dtype=torch.float64)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    hidden = (distance < 0) | (distance >= (window or 6))
    spread = logit_spread(logits.masked_fill(hidden, -torch.inf).softmax(-1), window)
    rows = [
        [logits[b, h, t, s].item() for s in range(t + 1) if t - s < (window or 6)]
        for b in range(2)
        for h in range(3)
        for t in range(1, 6)
    ]
    assert spread == pytest.approx(sqrt(np.mean([np.var(row) for row in rows])))
