"""A change of basis through norms against loops, and a check that notices a wrong D."""

import math

import pytest
import torch
from checking import FLOAT, failures, normal

from experiments.theory.layer_norm import statement as norms


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_f_by_loops_and_the_identity(norm):
    d, eps = 5, 1e-3
    a, x = normal(d, d, seed=5), normal(d, seed=6)
    made = norms.conjugacy(a, norm)
    torch.testing.assert_close(made.matrix, torch.diag(made.diagonal) @ a)

    def normed(v: list[float]) -> list[float]:
        mean = sum(v) / d if norm == "layernorm" else 0.0
        size = math.sqrt(sum((c - mean) ** 2 for c in v) / d + eps)
        return [(c - mean) / size for c in v]

    z = [sum(float(made.matrix[i, j]) * c for j, c in enumerate(normed(x.tolist()))) for i in range(d)]
    factor = math.sqrt(d * eps / (d - sum(c * c for c in z)))
    f = [factor * c for c in z]
    assert norms.carried(x, made.matrix, norm, eps).tolist() == pytest.approx(f)
    assert normed(f) == pytest.approx(z)
    # alpha: how long f is, against M_0 of the (centred) input.
    centred = x - x.mean() if norm == "layernorm" else x
    length = float((made.matrix @ centred).norm())
    assert float(norms.contraction(x, made.matrix, norm, eps)) == pytest.approx(math.dist(f, [0] * d) / length)


def test_m0_keeps_the_zero_mean_subspace_and_its_ball():
    made = norms.conjugacy(normal(6, 6, seed=7), "layernorm")
    z = normal(1000, 6, seed=8)
    z = z - z.mean(1, keepdim=True)
    image = z @ made.matrix.T
    assert float(image.mean(1).abs().max()) < 1e-14
    assert float((image.norm(dim=1) / z.norm(dim=1)).max()) == pytest.approx(1, abs=0.05)
    assert float((image.norm(dim=1) / z.norm(dim=1)).max()) <= 1 + 1e-12


def test_dyt_of_the_inverse_and_the_shifted_cube():
    made = norms.conjugacy(normal(4, 4, seed=9), "dyt")
    assert made.matrix.abs().sum(1).tolist() == pytest.approx([1] * 4)
    x = 3 * normal(20, 4, seed=10)
    image = torch.tanh(norms.carried(x, made.matrix, "dyt", 0.0))
    torch.testing.assert_close(image, torch.tanh(x) @ made.matrix.T)
    difference = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=FLOAT)
    assert norms.shifted_box_escape(difference, 2.0, 4.0)  # u - v is zero on the cube, and no factor moves that
    assert not norms.shifted_box_escape(difference, -0.5, 1.5)
    assert not norms.shifted_box_escape(difference.abs(), 2.0, 4.0)


def test_what_no_vector_is_mapped_to_is_refused():
    with pytest.raises(ValueError, match="outside the ball"):
        norms.radial_inverse(torch.ones(4, dtype=FLOAT), 1e-5)


def test_defects_are_those_of_the_matrices():
    """A rotation does not change the sphere: the mean over u is 1 - ||M||^2 / d, matrix by matrix."""
    d, matrices, vectors = 6, 3, 40_000
    defects = norms.random_defects(d, matrices, vectors, seed=11)
    generator = torch.Generator().manual_seed(11)
    for index in range(matrices):
        matrix = torch.randn(d, d, generator=generator, dtype=FLOAT) / d**0.5
        torch.randn(vectors, d, generator=generator, dtype=FLOAT)
        own = slice(index * vectors, (index + 1) * vectors)
        assert float(defects.plain[own].mean()) == pytest.approx(1 - float(matrix.square().sum()) / d, abs=0.01)
        assert bool((defects.clamped[own] >= 0).all())
        assert bool((defects.clamped[own] >= defects.plain[own]).all())


def test_the_clamped_limit_in_closed_form():
    below = (math.pi / 3 - math.sqrt(3) / 4) / math.pi
    above = 1 - (math.pi / 3 + math.sqrt(3) / 2) / math.pi
    assert norms.clamped_defect_limit() == pytest.approx(1 - below - above)
    assert norms.clamped_defect_limit() == pytest.approx(0.4135, abs=1e-4)


def test_an_affine_map_is_found_to_be_one():
    x = normal(200, 4, seed=12)
    assert norms.linear_error(x, x @ normal(4, 4, seed=13) + 2) < 1e-12
    assert norms.linear_error(x, x.abs()) > 0.9


def test_a_wrong_d_fails(monkeypatch):
    conjugacy = norms.conjugacy

    def perturbed(a, norm):
        made = conjugacy(a, norm)
        wrong = made.diagonal * torch.linspace(0.9, 0.99, len(a), dtype=FLOAT)
        return norms.Conjugacy(wrong, wrong[:, None] * a)

    monkeypatch.setattr(norms, "conjugacy", perturbed)
    assert "L(f(x)) = D A L(x)" in failures("layer-norm")
