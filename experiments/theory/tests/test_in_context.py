"""In-context regression (Wu et al. 2025, Theorem 2): moments, exact losses, constructions, training."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.theory.in_context import statement as regression
from experiments.theory.in_context.statement import FLOAT, Task, Weights
from experiments.theory.in_context.training import Recipe, errors, forward, initial, train

ATTENTION, FIRST_VALUE = False, True


def random_weights(task: Task, rows: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=FLOAT)

    d = task.d
    return Weights(normal(rows, d), normal(d - rows, d), normal(2, d, rows), normal(2, d, d))


# Moments


@pytest.mark.parametrize("task", [Task(1, 3, 0.6, 0.7), Task(2, 1, 0.6, 0.7)], ids=str)
def test_moments_are_those_of_a_sum_over_every_quadrature_point(task):
    """Three Gauss-Hermite points a variable integrate degree five exactly; no variable has more than four here."""
    d, n = task.d, task.n
    points, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    moments = np.zeros((2 * d,) * 4)
    with_target = np.zeros((2 * d, 2 * d, d, d))
    target = 0.0
    for indices in itertools.product(range(3), repeat=d * d + 2 * d * n):
        values, weight = points[list(indices)], weights[list(indices)].prod()
        w = task.prior * np.eye(d) + values[: d * d].reshape(d, d)
        x, noise = values[d * d :].reshape(2, d, n)
        z = np.concatenate([x, w @ x + task.sigma * noise])
        c = z @ z.T
        moments += weight * np.multiply.outer(c, c)
        with_target += weight * np.multiply.outer(c, w)
        target += weight * (w**2).sum()
    exact = regression.second_moments(task)
    np.testing.assert_allclose(exact[0], moments, atol=1e-9)
    np.testing.assert_allclose(exact[1], with_target, atol=1e-9)
    assert exact[2] == pytest.approx(target)


def test_nodes_have_the_moments():
    task = Task(3, 5, 0.6, 0.7)
    c, w, _ = regression.nodes(task)
    moments, with_target, _ = regression.second_moments(task)
    torch.testing.assert_close(torch.einsum("sij,skl->ijkl", c, c), moments, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(torch.einsum("sij,spq->ijpq", c, w), with_target, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
@pytest.mark.parametrize("rows", range(4))
def test_the_short_form_is_the_network_token_by_token(rows, skip):
    task = Task(3, 4, 0.5, 0.3)
    weights = random_weights(task, rows)
    tokens, _ = regression.sample(task, 5, torch.Generator().manual_seed(1))
    pairs = torch.cat([tokens[..., 0:-1:2], tokens[..., 1::2]], 1)
    t = regression.predict(weights, pairs @ pairs.transpose(1, 2), skip)
    expected = (t @ tokens[..., -1:])[..., 0]
    torch.testing.assert_close(regression.forward(weights, tokens, skip), expected)


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
def test_exact_losses_are_the_sampled_ones(skip):
    task = Task(2, 3, 0.5, 0.4)
    weights = random_weights(task, 1)
    weights = replace(weights, values=0.02 * weights.values)
    losses = regression.sampled_losses(task, [(weights, skip)], 40_000, seed=2)[0]
    assert abs(float(losses.mean()) - regression.exact_loss(task, weights, skip)) < 2 * regression.half_width(losses)


# The statement at W_0 = 0


@pytest.mark.parametrize("rows", range(5))
def test_constructions_reach_the_closed_forms(rows):
    task = Task(4, 6, 0.5)
    first_value = regression.first_value_optimum(task, rows)
    expected = regression.closed_form_loss(task, rows, FIRST_VALUE)
    assert regression.exact_loss(task, first_value, FIRST_VALUE) == pytest.approx(expected, abs=1e-9)
    attention = regression.attention_near_optimum(task, rows, scale=100)
    expected = regression.closed_form_loss(task, rows, ATTENTION)
    assert expected <= regression.exact_loss(task, attention, ATTENTION) + 1e-9
    assert regression.exact_loss(task, attention, ATTENTION) == pytest.approx(expected, abs=1e-6)


def test_the_optimum_is_one_step_of_gradient_descent():
    task = Task(3, 5, 0.5)
    tokens, _ = regression.sample(task, 4, torch.Generator().manual_seed(3))
    x, y, last = tokens[..., 0:-1:2], tokens[..., 1::2], tokens[..., -1:]
    step = 1 / (task.n + task.d + 1 + task.sigma**2)
    predictions = regression.forward(regression.first_value_optimum(task, 3), tokens, FIRST_VALUE)
    torch.testing.assert_close(predictions, (step * y @ x.transpose(1, 2) @ last)[..., 0])


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
@pytest.mark.parametrize("rows", [1, 2])
def test_an_optimiser_finds_the_closed_form_and_nothing_below(rows, skip):
    task = Task(2, 4, 0.5)
    optimum = regression.optimise(task, rows, skip, starts=4)
    expected = regression.closed_form_loss(task, rows, skip)
    assert optimum.loss == pytest.approx(expected, abs=1e-4)
    assert min(optimum.losses) > expected - 1e-7
    assert regression.exact_loss(task, optimum.weights, skip) == pytest.approx(optimum.loss, abs=1e-4)


def test_the_closed_gap_is_the_least_over_rows_and_positive_everywhere():
    for d, n, sigma in itertools.product((1, 2, 3, 7), (1, 2, 20), (0.0, 1.0, 10.0)):
        task = Task(d, n, sigma)
        expected = (d * d - (d // 2) * (d - d // 2)) * n / (n + d + 1 + sigma**2)
        assert regression.closed_form_gap(task) == pytest.approx(expected)
        assert regression.closed_form_gap(task) > 0


def sampled_gap(task: Task, first_value: Weights, skip: bool) -> tuple[float, float]:
    attention = regression.attention_near_optimum(task, task.d // 2, 30)
    losses = regression.sampled_losses(task, [(attention, ATTENTION), (first_value, skip)], 20_000, seed=4)
    gaps = losses[0] - losses[1]
    return float(gaps.mean()), regression.half_width(gaps)


def test_the_sampled_gap_agrees_and_notices_what_is_broken():
    task = Task(2, 4, 0.5)
    optimum = regression.first_value_optimum(task, 2)
    gap = regression.closed_form_gap(task)
    mean, half_width = sampled_gap(task, optimum, FIRST_VALUE)
    assert abs(mean - gap) < 2 * half_width < gap
    turned = replace(optimum, values=optimum.values * torch.tensor([-1.0, 1.0], dtype=FLOAT)[:, None, None])
    for broken, skip in ((turned, FIRST_VALUE), (optimum, ATTENTION)):
        mean, half_width = sampled_gap(task, broken, skip)
        assert mean + half_width < 0, "broken, it is worse than attention"
        infimum = regression.closed_form_loss(task, task.d // 2, ATTENTION)
        assert infimum - regression.exact_loss(task, broken, skip) < 0


def test_without_the_first_layer_value_the_gap_is_gone(monkeypatch):
    whole = regression.attended
    monkeypatch.setattr(regression, "attended", lambda c, copy, first_layer_value: whole(c, copy, False))
    task = Task(2, 4, 0.5)
    best = min(regression.optimise(task, rows, FIRST_VALUE, starts=3).loss for rows in range(3))
    assert best == pytest.approx(regression.closed_form_loss(task, 1, ATTENTION), abs=1e-4)


# Where it does not hold


def test_with_no_rows_in_a_both_predict_zero():
    task = Task(3, 4, 0.5, 2.0)
    weights = random_weights(task, 0)
    tokens, _ = regression.sample(task, 3, torch.Generator().manual_seed(5))
    for skip in (ATTENTION, FIRST_VALUE):
        assert not regression.forward(weights, tokens, skip).any()
        assert regression.exact_loss(task, weights, skip) == pytest.approx(task.zero_loss)


@pytest.mark.parametrize("task", [Task(2, 4, 0.5, 6.0), Task(3, 6, 0.5, 8.0)], ids=str)
def test_at_one_a_the_first_value_is_worse_inside_the_hypothesis(task):
    assert task.in_hypothesis
    copy = regression.reversing_copy(task)
    attention = regression.split_attention(task, copy)
    loss = regression.exact_loss(task, attention, ATTENTION)
    assert loss == pytest.approx(regression.split_attention_loss(task), abs=1e-8)
    none = torch.zeros(0, task.d, dtype=FLOAT)
    first_value = regression.optimise(task, task.d, FIRST_VALUE, copy=(copy, none), starts=4)
    assert first_value.loss == pytest.approx(regression.reversed_first_value_loss(task), abs=1e-4)
    assert regression.reversal_bound(task) < 0
    assert regression.reversal_prior(task) < task.prior


def test_the_reversal_begins_where_it_is_said_to():
    task = Task(8, 16, 0.5)
    at = replace(task, prior=regression.reversal_prior(task))
    assert regression.reversal_bound(at) == pytest.approx(0, abs=1e-9)


def test_the_proofs_bound_at_full_rows_is_broken_by_a_prior():
    """One head on X X^T predicts W_0 x, which an argument from the symmetry of Y leaves out."""
    task = Task(2, 4, 0.5, 2.0)
    identity = torch.eye(2, dtype=FLOAT)
    values = torch.stack([task.prior / (task.n + task.d + 1) / 2 * identity, 0 * identity])
    weights = Weights(identity, torch.zeros(0, 2, dtype=FLOAT), identity.expand(2, 2, 2), values)
    at_most = task.zero_loss - task.d * task.prior**2 * task.n / (task.n + task.d + 1)
    assert regression.exact_loss(task, weights, ATTENTION) == pytest.approx(at_most)
    assert at_most < task.zero_loss


def test_the_proofs_constant_vanishes_with_few_examples():
    task = Task(4, 2, 0.5)
    assert float(regression.proof_constant(task, 3, 100, seed=0).max()) < 1e-12
    assert float(regression.proof_constant(task, 1, 100, seed=0).mean()) > 0.1
    assert regression.closed_form_gap(task) > 1


# Trained freely

SMALL = Recipe(steps=250, batch_size=64, warmup_steps=25, seeds=3, evaluation_sequences=4000)


@pytest.mark.parametrize("skip", [ATTENTION, FIRST_VALUE])
def test_from_tokens_alone_the_prediction_does_not_know_the_pairs(skip):
    """The printed equations: the same for Y and -Y and for any pairing, so at W_0 = 0 nothing beats predicting zero."""
    task = Task(2, 4, 0.5)
    tokens, _ = regression.sample(task, 6, torch.Generator().manual_seed(6))
    negated, shuffled = tokens.clone(), tokens.clone()
    negated[..., 1::2] *= -1
    shuffled[..., 1::2] = tokens[..., [3, 1, 7, 5]]
    parameters = initial(task, False, SMALL)
    predictions = forward(parameters, tokens[None], skip)
    torch.testing.assert_close(forward(parameters, negated[None], skip), predictions)
    torch.testing.assert_close(forward(parameters, shuffled[None], skip), predictions)
    parameters = initial(task, True, SMALL)
    assert not torch.allclose(forward(parameters, shuffled[None], skip), forward(parameters, tokens[None], skip))


@pytest.mark.slow
def test_trained_with_positions_the_first_value_wins():
    task = Task(1, 4, 0.5)
    losses = {}
    for skip in (ATTENTION, FIRST_VALUE):
        parameters = train(task, skip, True, SMALL)
        losses[skip] = errors(task, parameters, skip, SMALL.evaluation_sequences, seed=7).mean(1)
        assert float(losses[skip].min()) > regression.closed_form_loss(task, 1, FIRST_VALUE) - 0.05
    assert float(losses[ATTENTION].min() - losses[FIRST_VALUE].min()) > 0.2


def test_training_is_paired():
    task = Task(1, 2, 0.5)
    short = replace(SMALL, steps=3, seeds=2)
    losses = [errors(task, train(task, ATTENTION, True, short), ATTENTION, 50, seed=8) for _ in range(2)]
    assert torch.equal(*losses)
