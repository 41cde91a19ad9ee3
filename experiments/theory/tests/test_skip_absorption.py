"""Skip absorption against loops and every index set, and a check that notices broken constructions."""

import itertools

import numpy as np
import pytest
import torch
from checking import failures
from torch.nn import functional as F

from experiments.theory.skip_absorption import statement as skips
from leanqkv.errors import LeanError


def test_an_mlp_by_loops():
    rng = np.random.default_rng(0)
    w1, w2, z, x = (rng.standard_normal(shape) for shape in ((6, 3), (3, 6), (3, 3), (3, 2)))
    for column in range(2):
        hidden = [max(0.0, sum(w1[j, c] * x[c, column] for c in range(3))) for j in range(6)]
        for row in range(3):
            expected = sum(w2[row, j] * hidden[j] for j in range(6)) + sum(z[row, c] * x[c, column] for c in range(3))
            assert skips.mlp(w1, w2, x, z)[row, column] == pytest.approx(expected)


def test_absorbing_takes_away_the_chosen_part_whatever_it_is():
    rng = np.random.default_rng(1)
    w1, w2, x = rng.standard_normal((8, 2)), rng.standard_normal((2, 8)), rng.standard_normal((2, 50))
    chosen = rng.random(8) < 0.5
    v1, v2 = skips.absorb(w1, w2, chosen)
    expected = F.relu(torch.from_numpy(w1 @ x)).numpy()
    expected = w2 @ expected - w2[:, chosen] @ w1[chosen] @ x
    np.testing.assert_allclose(skips.mlp(v1, v2, x), expected, atol=1e-12)


def test_the_decision_tries_every_index_set():
    rng = np.random.default_rng(2)
    w1, w2, target = rng.standard_normal((6, 2)), rng.standard_normal((2, 6)), rng.standard_normal((2, 2))
    least = min(
        np.linalg.norm(w2[:, list(chosen)] @ w1[list(chosen)] - target)
        for size in range(7)
        for chosen in itertools.combinations(range(6), size)
    )
    nearest, distance = skips.nearest_index_set(w1, w2, target)
    assert distance == pytest.approx(least)
    assert np.linalg.norm(w2[:, nearest] @ w1[nearest] - target) == pytest.approx(least)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_constructed_weights_meet_the_condition(size):
    w1, w2, chosen = skips.absorbable_weights(2, 5, size, np.random.default_rng(3))
    assert chosen.sum() == size
    np.testing.assert_allclose(w2[:, chosen] @ w1[chosen], -np.eye(2), atol=1e-12)
    w1, w2, chosen = skips.absorbable_integers(3, 6, np.random.default_rng(4))
    assert w1.dtype == w2.dtype == np.int64
    assert (w2[:, chosen] @ w1[chosen] == -np.eye(3)).all()


def test_odd_and_even_parts_refute_random_weights_too():
    """Without the decision procedure: V_1 has to have the hyperplanes of W_1, so signs are all that is left to choose
    (N2), and the linear parts then differ for every choice of signs (N1)."""
    rng = np.random.default_rng(5)
    w1, w2 = rng.standard_normal((8, 2)), rng.standard_normal((2, 8))
    distances = [
        np.linalg.norm(w2 @ (np.array(signs)[:, None] * w1) - w2 @ w1 - 2 * np.eye(2))
        for signs in itertools.product((-1, 1), repeat=8)
    ]
    assert min(distances) == pytest.approx(2 * skips.nearest_index_set(w1, w2, -np.eye(2))[1])
    assert min(distances) > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w1, w2: (w1[:, :1], w2[:1]), "at least 2"),
        (lambda w1, w2: (w1, np.where(np.arange(8) == 1, 0, w2)), "column of W_2"),
        (lambda w1, w2: (np.where(np.arange(8)[:, None] == 1, 0, w1), w2), "row of W_1"),
        (lambda w1, w2: (w1, np.ones_like(w2)), "rank"),
        (lambda w1, w2: (np.concatenate([w1[:7], -2 * w1[:1]]), w2), "collinear"),
        (lambda w1, w2: (np.random.default_rng(7).standard_normal((21, 2)), np.ones((2, 21)) * [[1], [2]]), "rank"),
        (lambda w1, w2: tuple(np.random.default_rng(7).standard_normal(shape) for shape in ((21, 2), (2, 21))), "2^21"),
    ],
)
def test_what_cannot_be_decided_is_said(change, message):
    rng = np.random.default_rng(6)
    w1, w2 = change(rng.standard_normal((8, 2)), rng.standard_normal((2, 8)))
    with pytest.raises(LeanError) as error:
        skips.nearest_index_set(w1, w2, -np.eye(w1.shape[1]))
    assert message in str(error.value)


def test_a_random_v1_fails(monkeypatch):
    rng = np.random.default_rng(8)
    monkeypatch.setattr(skips, "absorb", lambda w1, w2, chosen: (rng.permutation(w1), w2))
    assert "the skip is absorbed" in failures("skip-absorption")


def test_a_forgotten_index_fails(monkeypatch):
    nearest = skips.nearest_index_set

    def forgetful(w1, w2, target):
        chosen, distance = nearest(w1, w2, target)
        chosen[chosen.argmax()] = False
        return chosen, distance

    monkeypatch.setattr(skips, "nearest_index_set", forgetful)
    assert "finds the J" in failures("skip-absorption")
