"""Analyses: every quantity against its definition, in loops and float64."""

from math import log, sqrt

import numpy as np
import pytest
import torch
from scipy import stats
from shapes import assert_near, randomize, tiny, tokens
from torch.nn import functional as F

from experiments.analysis.heads import (
    copy_losses,
    induction_scores,
    matching_weights,
    previous_token_scores,
    repeated_tokens,
    uniform_patterns,
    value_layers,
)
from experiments.analysis.probe import phases, probe_losses, slope_interval, train_probes
from experiments.analysis.similarity import (
    bucketed,
    head_similarity,
    off_diagonal_mean,
    token_similarity,
)
from experiments.analysis.weights import attention_spectra, initial_spreads
from leanqkv import LeanForCausalLM, preset


def build(shape: str, *mechanisms: str, **fields) -> LeanForCausalLM:
    return randomize(LeanForCausalLM(tiny(shape, *mechanisms, **fields))).double().eval()


# Similarity


def cosine(a, b) -> float:
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / sqrt(sum(x * x for x in a) * sum(y * y for y in b)))


def test_similarity_in_loops():
    draws = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    similarity = head_similarity(draws)
    for g in range(4):
        for h in range(4):
            values = [cosine(draws[b, t, g], draws[b, t, h]) for b in range(2) for t in range(3)]
            assert similarity[g, h].item() == pytest.approx(np.mean(values), abs=1e-12)
    states = draws[:, :, 0]
    similarity = token_similarity(states)
    for i in range(3):
        for j in range(3):
            expected = np.mean([cosine(states[b, i], states[b, j]) for b in range(2)])
            assert similarity[i, j].item() == pytest.approx(expected, abs=1e-12)
    pairs = [similarity[i, j].item() for i in range(3) for j in range(3) if i != j]
    assert off_diagonal_mean(similarity) == pytest.approx(np.mean(pairs))


def test_alike_is_one_and_orthogonal_is_zero():
    vector = torch.randn(2, 3, 1, 4)
    scale = torch.tensor([0.5, 1.0, 7.0])[:, None]
    assert_near(head_similarity(vector * scale), torch.ones(3, 3), 1e-6)
    orthogonal = torch.eye(4).expand(2, 3, 4, 4)
    assert torch.equal(head_similarity(orthogonal), torch.eye(4).double())
    assert off_diagonal_mean(head_similarity(orthogonal)) == 0
    assert off_diagonal_mean(torch.ones(1, 1)) == 1


def test_buckets_leave_tokens_alone_out():
    similarity = torch.rand(9, 9, dtype=torch.float64)
    means = bucketed(similarity, 3)
    for i in range(3):
        for j in range(3):
            pairs = [(a, b) for a in range(3 * i, 3 * i + 3) for b in range(3 * j, 3 * j + 3) if a != b]
            assert means[i, j].item() == pytest.approx(np.mean([similarity[a, b].item() for a, b in pairs]))
    with pytest.raises(ValueError, match="do not make 8 buckets"):
        bucketed(similarity, 8)


# Heads


def test_scores_in_loops():
    n = 6
    logits = torch.randn(2, 3, 2 * n, 2 * n, dtype=torch.float64)
    patterns = logits.masked_fill(torch.ones(2 * n, 2 * n).triu(1).bool(), -torch.inf).softmax(-1)
    for head in range(3):
        previous = [patterns[b, head, t, t - 1].item() for b in range(2) for t in range(1, 2 * n)]
        assert previous_token_scores(patterns)[head].item() == pytest.approx(np.mean(previous))
        copied = [patterns[b, head, n + i, i + 1].item() for b in range(2) for i in range(n)]
        assert induction_scores(patterns)[head].item() == pytest.approx(np.mean(copied))


def test_scores_of_heads_that_do_nothing_else_and_of_heads_at_chance():
    n = 5
    previous, induction = torch.zeros(2, 1, 1, 2 * n, 2 * n)
    for t in range(2 * n):
        previous[..., t, max(t - 1, 0)] = 1
        induction[..., t, t - n + 1 if t >= n else 0] = 1
    assert previous_token_scores(previous).item() == 1 and induction_scores(previous).item() == 0
    assert induction_scores(induction).item() == 1 and previous_token_scores(induction).item() < 0.2
    uniform = uniform_patterns(4)
    assert previous_token_scores(uniform).item() == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert induction_scores(uniform).item() == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_matching_in_loops():
    ids = tokens(3, 12, vocab_size=4)
    patterns = torch.rand(3, 2, 12, 12, dtype=torch.float64)
    weight, queries = matching_weights(patterns, ids)
    expected, number = np.zeros(2), 0
    for b in range(3):
        for t in range(12):
            after = [s + 1 for s in range(t - 1) if ids[b, s] == ids[b, t]]
            number += bool(after)
            expected += [sum(patterns[b, h, t, s].item() for s in after) for h in range(2)]
    assert queries == number > 10
    assert weight.tolist() == pytest.approx(expected)
    # Of a text given twice the earlier occurrence is the one of the first copy.
    induction = torch.zeros(1, 1, 8, 8)
    for t in range(4, 8):
        induction[..., t, t - 3] = 1
    weight, queries = matching_weights(induction, torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]]))
    assert weight.item() == queries == 4


def test_repeated_tokens_and_what_is_lost_on_them():
    ids = repeated_tokens(97, 3, 8, seed=0)
    assert ids.shape == (3, 16) and torch.equal(ids[:, :8], ids[:, 8:]) and ids.max() < 97
    assert torch.equal(ids, repeated_tokens(97, 3, 8, seed=0)) and len(set(ids[0, :8].tolist())) > 4
    model = build("gpt")
    log_probabilities = model(input_ids=ids).logits.log_softmax(-1)
    lost = [[-log_probabilities[b, t, ids[b, t + 1]].item() for t in range(15)] for b in range(3)]
    first, second = copy_losses(model, ids)
    assert first == pytest.approx(np.mean([row[:7] for row in lost]), rel=1e-6)
    assert second == pytest.approx(np.mean([row[8:] for row in lost]), rel=1e-6)


def test_where_values_come_from():
    def layers(*mechanisms, shape="gpt", **fields):
        return [value_layers(plan) for plan in tiny(shape, *mechanisms, **fields).plan.layers]

    assert layers("skipv1") == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0)]
    assert layers("skipv1:ratio=0.25") == [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 2, 0)]
    assert layers("skipv1", "gqa:group_size=2") == layers("skipv1")
    assert layers("skipv1:injection=odd_even")[2] == (2, 2, 0, 0)
    assert layers("skipv0")[1] == (1, 1)
    assert layers("cla-v") == [(0, 0, 0, 0), (0, 0, 0, 0), (2, 2, 2, 2)]
    assert layers("borrowed-values") == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 1, 1)]
    rows = {"type": "borrowed_values", "heads": [[0, 2, 0, 0], [2, 1, 0, 3], [2, 2, 1, 1]]}
    assert layers(key_value=rows) == [(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 2)]
    assert layers("mla:rank=8,rope_dim=4", "skipv1", shape="llama") == [None] * 3


# Probes


def batches(steps: int, layers: int = 2, width: int = 6, vocab_size: int = 5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        states = [torch.randn(8, width, dtype=torch.float64, generator=generator) for _ in range(layers)]
        yield states, torch.randint(vocab_size, (8,), generator=generator)


def test_probes_trained_together_are_those_trained_apart():
    rates, steps = (1e-3, 1e-2), 12
    together = train_probes(batches(steps), steps=steps, vocab_size=5, rates=rates)
    held_out, targets = next(batches(1))
    states = [layer.unflatten(0, (2, 4)) for layer in held_out]
    losses = probe_losses(together, states, targets.view(2, 4))
    assert losses.shape == (2, 2, 2)
    for layer in range(2):
        for place, rate in enumerate(rates):
            alone = (([states[layer]], targets) for states, targets in batches(steps))
            (((head,),)) = train_probes(alone, steps=steps, vocab_size=5, rates=(rate,))
            logits = head(held_out[layer])
            lost = [-logits[t].log_softmax(-1)[targets[t]].item() for t in range(8)]
            assert losses[layer, place].tolist() == pytest.approx([np.mean(lost[:4]), np.mean(lost[4:])], rel=1e-9)
    assert losses.unique().numel() == losses.numel()


def test_the_first_step_of_a_probe_by_hand():
    """AdamW from zero: a step against the sign of the gradient, of the rate after one step of warm-up."""
    states, targets = next(batches(1))
    steps, seen = 20, []
    heads = train_probes(
        [(states, targets)] * 2, steps=steps, vocab_size=5, rates=(1e-2,), progress=lambda: seen.append(1)
    )
    normed = (states[0] - states[0].mean(1, keepdim=True)) / (
        states[0].var(1, unbiased=False, keepdim=True) + 1e-5
    ).sqrt()
    gradient = (torch.full((8, 5), 1 / 5, dtype=torch.float64) - F.one_hot(targets, 5)).T @ normed
    # The warm-up of two steps starts at zero, so the second step is the first that moves, with the same gradient.
    assert_near(heads[0][0].weight.detach(), -5e-3 * gradient.sign(), 1e-4)
    assert len(seen) == 2


def test_a_probe_finds_what_is_there():
    def separable():
        generator = torch.Generator().manual_seed(0)
        centres = 3 * torch.eye(8)
        while True:
            targets = torch.randint(8, (32,), generator=generator)
            yield [centres[targets] + 0.01 * torch.randn(32, 8, generator=generator), torch.randn(32, 8)], targets

    source = separable()
    heads = train_probes((next(source) for _ in range(150)), steps=150, vocab_size=8, rates=(0.1,))
    states, targets = next(source)
    losses = probe_losses(heads, [layer[None] for layer in states], targets[None])[:, 0, 0]
    assert losses[0] < 0.02
    assert losses[1] > 0.9 * log(8), "noise tells nothing"


def test_slopes_and_phases():
    assert phases(12) == (range(7), range(7, 12))  # the paper's
    assert phases(6) == (range(3), range(3, 6)) and phases(4) == (range(2), range(2, 4))
    losses = np.random.default_rng(0).normal(size=(6, 9)) + np.arange(6)[:, None] * -0.3
    slope, half_width = slope_interval(losses, range(2, 6))
    each = [np.polyfit([2, 3, 4, 5], losses[2:, i], 1)[0] for i in range(9)]
    assert slope == pytest.approx(np.polyfit([2, 3, 4, 5], losses[2:].mean(1), 1)[0])
    low, high = stats.t.interval(0.95, 8, loc=np.mean(each), scale=stats.sem(each))
    assert (slope - half_width, slope + half_width) == pytest.approx((low, high))
    assert slope_interval(losses, range(2, 3)) is None and slope_interval(losses[:, :1], range(3)) is None


# Weights


def test_spectra_against_numpy():
    model = build("llama", "nonlinear-query", "gqa:group_size=2", "skipv1")
    spectra = attention_spectra(model.config, model.state_dict())
    assert set(spectra[0]) == {"q_proj.down_proj", "q_proj.up_proj", "k_proj", "v_proj", "o_proj"}
    for i, layer in enumerate(spectra):
        for name, kept in layer.items():
            weight = model.get_submodule(f"model.layers.{i}.self_attn.{name}").weight.detach().numpy()
            values = np.linalg.svd(weight, compute_uv=False)
            assert kept["shape"] == list(weight.shape)
            assert kept["condition"] == pytest.approx(np.linalg.cond(weight), rel=1e-9)
            assert kept["stable_rank"] == pytest.approx((weight**2).sum() / values[0] ** 2, rel=1e-9)
            assert len(kept["singular_values"]) == min(len(values), 17)
            assert kept["singular_values"][0] == pytest.approx(values[0])
            assert kept["singular_values"][-1] == pytest.approx(values[-1])
    singular = attention_spectra(model.config, {name: torch.ones_like(w) for name, w in model.state_dict().items()})
    assert singular[0]["o_proj"]["condition"] > 1e12


@pytest.mark.slow
def test_initial_spread_of_every_query():
    """Appendix B of Karbevski & Mijoski 2025: 1.8 at GPT-2's width, here as `1 / (initializer_range sqrt(d))`."""
    config = preset("gpt2-124m", num_hidden_layers=2, vocab_size=500)
    state = torch.get_rng_state()
    spreads = initial_spreads(config, tokens(2, 48, vocab_size=500), seed=0)
    assert torch.equal(state, torch.get_rng_state())
    assert set(spreads) == {"linear", "identity, scale 1", "identity, scale ½", "nonlinear", "residual", "from_mlp"}
    assert spreads["identity, scale 1"][0] / spreads["linear"][0] == pytest.approx(1 / (0.02 * sqrt(768)), abs=0.1)
    assert spreads["identity, scale ½"][0] / spreads["identity, scale 1"][0] == pytest.approx(0.5, rel=1e-3)
    assert spreads["from_mlp"][0] == pytest.approx(spreads["linear"][0])  # nothing below the first layer
    assert "identity, scale 1" not in initial_spreads(tiny("gpt", head_dim=4), tokens(1, 8), seed=0)
