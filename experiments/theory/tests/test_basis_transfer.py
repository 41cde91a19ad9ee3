"""Basis transfer against loops and least squares, and a check that notices a model without training."""

import math

import numpy as np
import pytest
import torch
from checking import failures

from experiments.theory.basis_transfer import statement as transfer
from experiments.theory.basis_transfer.statement import READINGS, Recipe
from experiments.theory.check import load_check


def test_the_linear_baseline_is_ridge_regression():
    target = transfer.make_target(4, READINGS["both by √d"], 0)
    linear = transfer.streaming_ridge(target, 10_000, 0.1, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(8192, 4, generator=generator), torch.randn(10_000 - 8192, 4, generator=generator)])
    y = target(x).double().numpy()
    penalty = math.sqrt(0.1 * 10_000) * np.eye(4)
    rows = np.concatenate([x.double().numpy(), penalty]), np.concatenate([y, np.zeros((4, 4))])
    np.testing.assert_allclose(linear.numpy(), np.linalg.lstsq(*rows, rcond=None)[0].T, atol=1e-6)


@pytest.mark.parametrize("name", READINGS)
def test_the_large_width_error_is_that_of_a_wide_target(name):
    target = transfer.make_target(192, READINGS[name], 0)
    x = torch.randn(1000, 192, generator=torch.Generator().manual_seed(2))
    y = target(x)
    linear = transfer.best_linear(target).float()
    assert transfer.relative_error(x @ linear.T, y) == pytest.approx(
        transfer.large_width_error(READINGS[name]), rel=0.05
    )


def test_the_papers_recipe():
    settings = load_check("basis-transfer").settings.paper()
    assert settings.widths == (256, 512, 768)
    recipe = settings.recipe
    assert (recipe.steps, recipe.batch_size, recipe.ridge_samples, recipe.clip) == (20_000, 65_536, 500_000, 3.0)


def test_target_student_and_distances_by_loops():
    target = transfer.make_target(3, READINGS["both by √d"], 0)
    student = transfer.Student(3).requires_grad_(False)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))

    def gelu(z: float) -> float:
        return z * (1 + math.erf(z / math.sqrt(2))) / 2

    def mlp(w1, w2, row) -> list[float]:
        hidden = [gelu(sum(float(w) * float(c) for w, c in zip(unit, row, strict=True))) for unit in w1]
        return [sum(float(w) * h for w, h in zip(output, hidden, strict=True)) for output in w2]

    for index, row in enumerate(x):
        expected = torch.tensor(mlp(target.w1, target.w2, row)) + target.linear @ row
        torch.testing.assert_close(target(x)[index], expected, rtol=1e-4, atol=1e-5)
        expected = torch.tensor(mlp(student.up.weight, student.down.weight, row)) + row
        torch.testing.assert_close(student(x)[index], expected, rtol=1e-4, atol=1e-5)
    y = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert transfer.relative_error(torch.zeros(2, 2), y) == 1
    assert transfer.cosine_distance(y.flip(1), y) == 1


def test_an_untrained_mlp_fails(monkeypatch):
    monkeypatch.setattr(transfer, "train", lambda target, *others: transfer.Student(len(target.linear)))
    assert "better than the best linear" in failures("basis-transfer")


def test_a_wrong_linear_baseline_fails(monkeypatch):
    best = transfer.best_linear
    monkeypatch.setattr(transfer, "best_linear", lambda target: best(target) + 0.1)
    recipe = Recipe(steps=2, batch_size=16, evaluation=500, ridge_samples=2000)
    assert "in closed form" in failures("basis-transfer", recipe=recipe)
