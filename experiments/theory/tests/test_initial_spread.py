"""The spread of initial logits against loops over the weights, and a check that notices a wrong identity query."""

import math

import numpy as np
import pytest
import torch
from checking import failures

from experiments.theory.initial_spread import check as initial_spread_check
from experiments.theory.initial_spread import statement as initial_spread
from leanqkv.model.projection_identity import IdentityProjection
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


def test_the_papers_numbers():
    assert 0.02**2 * math.sqrt(64) == pytest.approx(0.0032)
    assert 0.02 / math.sqrt(12) == pytest.approx(0.0058, abs=5e-5)
    assert initial_spread.identity_ratio(768, 0.02) == pytest.approx(0.02 / math.sqrt(12) / 0.0032)


def test_an_identity_query_that_is_not_one_fails(monkeypatch):
    forward = IdentityProjection.forward
    monkeypatch.setattr(initial_spread_check, "PRESETS", {"identity": "identity-query"})
    monkeypatch.setattr(IdentityProjection, "forward", lambda self, x: 1.3 * forward(self, x))
    assert "1.8 times" in failures("initial-spread")
