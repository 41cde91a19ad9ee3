"""The spread of initial logits against loops over the weights, and a check that notices a wrong identity query."""

import math

import numpy as np
import pytest
import torch
from checking import failures

from experiments.theory.initial_spread import check as initial_spread_check
from experiments.theory.initial_spread import statement as initial_spread
from leanqkv.model.projection_identity import IdentityProjection
from leanqkv.model.projection_nonlinear import NonlinearProjection
from leanqkv.presets import preset


@pytest.mark.parametrize("names", [(), ("identity-query",), ("residual-query",)])
def test_spreads_are_those_of_logits_from_the_weights(names):
    """First layer: embeddings, LayerNorm, projections and logits written out in float64."""
    config = preset("tiny", *names, vocab_size=50, num_hidden_layers=1)
    spreads, factors = initial_spread.logit_spreads(config, 3, 2, 6)
    torch.manual_seed(3)
    model = initial_spread.LeanForCausalLM(config).double().requires_grad_(False)
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(3))
    block = model.model.layers[0]
    embedded = model.model.embed_tokens.weight[tokens] + model.model.embed_positions.weight[:6]
    logits = []
    for sequence in embedded:
        rows = []
        for x in sequence:
            centred = x - x.mean()
            rows.append(centred / torch.sqrt((centred**2).mean() + config.norm_eps))
        x = torch.stack(rows)
        key = x @ block.self_attn.k_proj.weight.T
        linear = x @ block.self_attn.q_proj.weight.T if names != ("identity-query",) else x
        query = (x + linear) / 2 if names == ("residual-query",) else linear
        for head in range(4):
            own = slice(32 * head, 32 * (head + 1))
            logits += [float(q @ k) / math.sqrt(32) for q in query[:, own] for k in key[:, own]]
    assert spreads[0] == pytest.approx(float(np.std(logits, ddof=1)), rel=1e-4)
    assert factors == pytest.approx([0.5 if names == ("identity-query",) else 1.0])


def test_own_logits_are_those_of_queries_and_keys_from_the_weights():
    """First layer of `Q = (X + f(X)) / 2`, `K = X`, whose scale is halved, in float64."""
    config = preset("tiny", "nonlinear-query", "identity-key", vocab_size=50, num_hidden_layers=1)
    found = initial_spread.own_logits(config, 3, 2, 6)[0]
    torch.manual_seed(3)
    model = initial_spread.LeanForCausalLM(config).double().requires_grad_(False)
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(3))
    query = model.model.layers[0].self_attn.q_proj
    own, others, weights = [], [], []
    for sequence in model.model.embed_tokens.weight[tokens] + model.model.embed_positions.weight[:6]:
        x = torch.nn.functional.layer_norm(sequence, sequence.shape[-1:], eps=config.norm_eps)
        bottleneck = x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_eps) @ query.down_proj.weight.T
        f = torch.nn.functional.gelu(bottleneck) @ query.up_proj.weight.T
        q = (x + torch.nn.functional.layer_norm(f, f.shape[-1:], eps=config.norm_eps)) / 2
        for head in range(4):
            part = slice(32 * head, 32 * (head + 1))
            logits = [[float(q[i, part] @ x[j, part]) / (2 * math.sqrt(32)) for j in range(6)] for i in range(6)]
            own += [logits[i][i] for i in range(6)]
            others += [logits[i][j] for i in range(6) for j in range(6) if i != j]
            weights.append(math.exp(logits[5][5]) / sum(map(math.exp, logits[5])))
    expected = (np.mean(own) - np.mean(others), np.std(others, ddof=1), np.mean(weights))
    assert tuple(found) == pytest.approx(expected, rel=1e-4)
    assert initial_spread.own_logit(config) == pytest.approx(math.sqrt(32) / 4)


def test_the_papers_numbers():
    assert 0.02**2 * math.sqrt(64) == pytest.approx(0.0032)
    assert 0.02 / math.sqrt(12) == pytest.approx(0.0058, abs=5e-5)
    assert initial_spread.identity_ratio(768, 0.02) == pytest.approx(0.02 / math.sqrt(12) / 0.0032)


def test_a_nonlinear_projection_without_its_anchor_fails(monkeypatch):
    from_bottleneck = NonlinearProjection.from_bottleneck
    monkeypatch.setattr(
        NonlinearProjection,
        "from_bottleneck",
        lambda self, x, bottleneck: from_bottleneck(self, torch.zeros_like(x), bottleneck),
    )
    assert "logit with itself" in failures("initial-spread")


def test_an_identity_query_that_is_not_one_fails(monkeypatch):
    forward = IdentityProjection.forward
    monkeypatch.setattr(initial_spread_check, "PRESETS", {"identity": "identity-query"})
    monkeypatch.setattr(IdentityProjection, "forward", lambda self, x: 1.3 * forward(self, x))
    assert "1.8 times" in failures("initial-spread")
