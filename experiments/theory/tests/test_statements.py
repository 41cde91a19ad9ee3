"""The appendices' statements against loops in float64, and checks that fail when a construction is broken."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from experiments.theory import basis_transfer as transfer
from experiments.theory import hadamard, initial_spread, initial_spread_check
from experiments.theory import layer_norm as norms
from experiments.theory import skip_absorption as skips
from experiments.theory.basis_transfer import READINGS, Recipe
from experiments.theory.check import load_check
from experiments.theory.hadamard_check import MASKS, make_mask
from leanqkv.errors import LeanError
from leanqkv.model.projection_identity import IdentityProjection
from leanqkv.presets import preset

FLOAT = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def failures(name: str, **settings) -> str:
    """The findings that fail, one per line."""
    check = load_check(name)
    settings = {**SMALL[name], **settings}
    record = check.run(replace(check.settings.quick(), **settings), lambda part, done, total: None)
    failed = [finding["what"] for finding in record["outcome"]["findings"] if not finding["passed"]]
    assert record["outcome"]["passed"] == (not failed)
    return "\n".join(failed)


# Small enough that a check takes a second or two; each passes as it is.
SMALL = {
    "initial-spread": {"widths": (192,), "batch": 1, "length": 64},
    "layer-norm": {"widths": (8, 16), "defect_widths": (32, 128)},
    "basis-transfer": {
        "readings": ("both by √(4d)",),
        "recipe": Recipe(
            steps=700, batch_size=128, warmup_steps=20, learning_rate=1e-2, evaluation=1000, ridge_samples=10_000
        ),
    },
    "skip-absorption": {"draws": 3},
    "hadamard": {"cases": 20},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_check_passes(name):
    assert failures(name) == ""


# Appendix A


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (4, 2), (4, 1)])
def test_block_attention_is_attention_token_by_token(heads, groups, mask_kind):
    width, length = 3, 5
    d = heads * width
    x, wq = normal(length, d, seed=1), normal(d, d, seed=2)
    wk, wv = normal(2, d, groups * width, seed=3)
    mask = make_mask(mask_kind, length, torch.Generator().manual_seed(4))
    expected = torch.zeros(length, d, dtype=FLOAT)
    for head in range(heads):
        group = head // (heads // groups)
        for i in range(length):
            query = [float(x[i] @ wq[:, head * width + c]) for c in range(width)]
            scores = []
            for j in range(length):
                key = [float(x[j] @ wk[:, group * width + c]) for c in range(width)]
                scores.append(sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(width))
            seen = [j for j in range(length) if mask[i, j] == 0]
            total = sum(math.exp(scores[j]) for j in seen)
            for c in range(width):
                values = [math.exp(scores[j]) / total * float(x[j] @ wv[:, group * width + c]) for j in seen]
                expected[i, head * width + c] = sum(values)
    for attention in (hadamard.block_attention, hadamard.attention_by_heads):
        torch.testing.assert_close(attention(x, wq, wk, wv, mask, heads, groups), expected)


def test_a_dropped_head_fails(monkeypatch):
    apply = hadamard.apply_blocks

    def drop(a, f, heads):
        found = apply(a, f, heads)
        return torch.cat([found[:, : -(found.shape[1] // heads)], 0 * found[:, -(found.shape[1] // heads) :]], 1)

    monkeypatch.setattr(hadamard, "apply_blocks", drop)
    assert "head by head" in failures("hadamard")


def test_a_softmax_over_all_heads_at_once_fails(monkeypatch):
    def together(a, mask, heads):
        return torch.softmax(a + mask.repeat(1, heads), -1)

    monkeypatch.setattr(hadamard, "softmax_blocks", together)
    assert "head by head" in failures("hadamard")


# Appendix B


@pytest.mark.parametrize("names", [(), ("identity-query",), ("residual-query",)])
def test_spreads_are_those_of_logits_from_the_weights(names):
    """First layer: embeddings, LayerNorm, projections and logits written out in float64."""
    config = preset("tiny", *names, vocab_size=50, num_hidden_layers=1, fuse_projections=False)
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


# Appendix C


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
    found = norms.random_defects(d, matrices, vectors, seed=11)
    generator = torch.Generator().manual_seed(11)
    for index in range(matrices):
        matrix = torch.randn(d, d, generator=generator, dtype=FLOAT) / d**0.5
        torch.randn(vectors, d, generator=generator, dtype=FLOAT)
        own = slice(index * vectors, (index + 1) * vectors)
        assert float(found.plain[own].mean()) == pytest.approx(1 - float(matrix.square().sum()) / d, abs=0.01)
        assert bool((found.clamped[own] >= 0).all())
        assert bool((found.clamped[own] >= found.plain[own]).all())


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


# Appendix D


def test_the_linear_baseline_is_ridge_regression():
    target = transfer.make_target(4, READINGS["both by √d"], 0)
    found = transfer.streaming_ridge(target, 10_000, 0.1, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(8192, 4, generator=generator), torch.randn(10_000 - 8192, 4, generator=generator)])
    y = target(x).double().numpy()
    penalty = math.sqrt(0.1 * 10_000) * np.eye(4)
    rows = np.concatenate([x.double().numpy(), penalty]), np.concatenate([y, np.zeros((4, 4))])
    np.testing.assert_allclose(found.numpy(), np.linalg.lstsq(*rows, rcond=None)[0].T, atol=1e-6)


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


# Appendix E


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
    found, distance = skips.nearest_index_set(w1, w2, target)
    assert distance == pytest.approx(least)
    assert np.linalg.norm(w2[:, found] @ w1[found] - target) == pytest.approx(least)


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
