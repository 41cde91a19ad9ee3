"""The fit of latent keys: its sums against loops, its first-order error against autograd, every rank written out."""

from types import SimpleNamespace

import pytest
import torch
from converting import source
from shapes import assert_near
from torch import Tensor

from leanqkv.convert.latent_keys import KeyGrams, UnrotatedKeyGrams, can_be_latent, column_gains, key_latent
from leanqkv.model.layers import OffsetRMSNorm

HEADS, GROUP, WIDTH, LENGTH, HIDDEN = 3, 2, 8, 5, 7


def problem(seed: int = 0, batch: int = 2) -> tuple[SimpleNamespace, Tensor, Tensor]:
    """What a recorder holds of causal attention, the weights of the tokens, and W_O; float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = normal(batch, HEADS * GROUP, LENGTH, WIDTH), normal(batch, HEADS, LENGTH, WIDTH)
    values, output = normal(batch, HEADS, LENGTH, WIDTH), normal(HEADS, GROUP, WIDTH, HIDDEN)
    patterns, heads = attention(query, key, values)
    recorder = SimpleNamespace(query=query, key=key, values=values, patterns=patterns, heads=heads)
    return recorder, normal(batch, LENGTH).exp(), output


def attention(query: Tensor, key: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.repeat_interleave(GROUP, 1).mT * WIDTH**-0.5
    patterns = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).softmax(-1)
    return patterns, (patterns @ values.repeat_interleave(GROUP, 1)).transpose(1, 2)


def output_of(heads: Tensor, output: Tensor) -> Tensor:
    return torch.einsum("bthd,hdo->bto", heads, output.flatten(0, 1))


@pytest.mark.parametrize("rotary", [True, False])
def test_sums_over_keys_and_queries(rotary: bool) -> None:
    """By loops over every token, head and pair of heads."""
    recorder, weight, output = problem()
    grams = KeyGrams(output, rotary, 0.5)
    grams.add(recorder, weight)
    batch, half = len(weight), WIDTH // 2
    importance = torch.zeros(batch, HEADS, LENGTH, dtype=torch.float64)
    energy = torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64)
    for b in range(batch):
        for query in range(HEADS * GROUP):
            head = query // GROUP
            matrix = output[head, query % GROUP]
            for t in range(LENGTH):
                row = recorder.query[b, query, t]
                energy[head] += torch.outer(row, row) / GROUP
                for s in range(LENGTH):
                    moved = recorder.patterns[b, query, t, s] * (
                        recorder.values[b, head, s] - recorder.heads[b, t, query]
                    )
                    importance[b, head, s] += float((weight[b, t] * moved @ matrix).square().sum())
    assert_near(grams.importance, importance.sum((0, 2)), 1e-5)
    keys = recorder.key * importance.sum(1)[:, None, :, None].sqrt()
    if not rotary:
        rows = keys.transpose(1, 2).flatten(2).flatten(0, 1)
        assert_near(grams.keys, sum(torch.outer(row, row) for row in rows), 1e-5)
        assert_near(grams.queries, energy, 1e-12)
        return
    for frequency in range(half):
        for first in range(HEADS):
            square = energy[first, frequency, frequency] + energy[first, frequency + half, frequency + half]
            assert_near(grams.queries[frequency, first], square, 1e-12)
            for second in range(HEADS):
                one, two = (
                    torch.complex(keys[:, head, :, frequency], keys[:, head, :, frequency + half]).flatten()
                    for head in (first, second)
                )
                assert_near(
                    torch.view_as_real(grams.keys[frequency, first, second]),
                    torch.view_as_real((one.conj() * two).sum()),
                    1e-5,
                )


def test_the_importance_is_how_far_a_score_moves_the_output() -> None:
    """Against the derivative of attention's output by every score."""
    recorder, weight, output = problem(1, batch=1)
    scores = (recorder.patterns.clamp_min(1e-300)).log().requires_grad_()
    heads = (scores.softmax(-1) @ recorder.values.repeat_interleave(GROUP, 1)).transpose(1, 2)
    result = output_of(heads, output) * weight[..., None]
    expected = torch.zeros(1, HEADS * GROUP, LENGTH, dtype=torch.float64)
    for t in range(LENGTH):
        for column in range(HIDDEN):
            (gradient,) = torch.autograd.grad(result[0, t, column], scores, retain_graph=True)
            # Of a query's own scores; those of other queries do not move it.
            expected[0] += gradient[0, :, t].square()
    assert_near(KeyGrams(output, True, 1.0)._importance(recorder, weight), expected, 1e-5)


def unrotated_problem(seed: int = 0, batch: int = 2) -> tuple[SimpleNamespace, Tensor, Tensor, Tensor]:
    """The same where keys are turned, with what they were before; and the rotation of every position as a matrix."""
    recorder, weight, output = problem(seed, batch)
    generator = torch.Generator().manual_seed(seed + 1)
    plain = torch.randn(batch, HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    angles = torch.outer(torch.arange(LENGTH).double(), torch.tensor([1.3, 0.4, 0.2, 0.05], dtype=torch.float64))
    matrices = torch.zeros(LENGTH, WIDTH, WIDTH, dtype=torch.float64)
    for position in range(LENGTH):
        for i, angle in enumerate(angles[position]):
            j = i + WIDTH // 2
            matrices[position, i, i] = matrices[position, j, j] = angle.cos()
            matrices[position, i, j], matrices[position, j, i] = -angle.sin(), angle.sin()
    key = torch.einsum("sij,bhsj->bhsi", matrices, plain)
    patterns, heads = attention(recorder.query, key, recorder.values)
    cos, sin = (torch.cat((part, part), -1)[None] for part in (angles.cos(), angles.sin()))
    sin[..., : WIDTH // 2] *= -1
    given = {**vars(recorder), "key": key, "patterns": patterns, "heads": heads, "rotation": (cos, sin)}
    return SimpleNamespace(**given, projected_key=plain.transpose(1, 2).flatten(2)), weight, output, matrices


def norm_of(columns: int) -> OffsetRMSNorm | None:
    """A norm of so many columns with any weights; of none, no norm."""
    if not columns:
        return None
    norm = OffsetRMSNorm(columns, 1e-3, 1.0).double().requires_grad_(False)
    norm.weight.data = torch.randn(columns, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return norm


def before_norm(norm: OffsetRMSNorm, row: Tensor, head: int, met: Tensor) -> Tensor:
    """The direction of a head [head_dim] of the keys `row` in which their norm moves along `met`, by its gradient."""
    heads = row.view(HEADS, WIDTH).clone().requires_grad_()
    behind = norm(heads.flatten()).view(HEADS, WIDTH) if len(norm.weight) > WIDTH else norm(heads)
    (gradient,) = torch.autograd.grad(behind[head] @ met, heads)
    return gradient[head]


@pytest.mark.parametrize("normed", [0, WIDTH, HEADS * WIDTH])
def test_queries_meet_unrotated_keys_turned_back(normed: int) -> None:
    """By loops over scores: for the signs that are drawn, and on average over signs, of each score by itself."""
    recorder, weight, output, matrices = unrotated_problem()
    norm = norm_of(normed)
    grams = UnrotatedKeyGrams(output, 0.5, torch.Generator().manual_seed(3), norm)
    grams.add(recorder, weight)
    shape = (len(weight), HEADS * GROUP, LENGTH)
    signs = 2 * torch.randint(2, shape, generator=torch.Generator().manual_seed(3)) - 1
    drawn, alone = torch.zeros(2, HEADS, WIDTH, WIDTH, dtype=torch.float64)
    keys, total = torch.zeros(HEADS * WIDTH, HEADS * WIDTH, dtype=torch.float64), 0.0
    for b in range(len(weight)):
        for s in range(LENGTH):
            row, counted = recorder.projected_key[b, s], 0.0
            for query in range(HEADS * GROUP):
                head, met, share = query // GROUP, torch.zeros(WIDTH, dtype=torch.float64), 1.0
                if norm is not None:
                    gain = (norm.weight + 1).view(-1, WIDTH)[head if normed > WIDTH else 0]
                    own = row if normed > WIDTH else row.view(HEADS, WIDTH)[head]
                    share = float(gain.square().mean() / (own.square().mean() + 1e-3))
                for t in range(LENGTH):
                    moved = recorder.values[b, head, s] - recorder.heads[b, t, query]
                    moved = weight[b, t] * recorder.patterns[b, query, t, s] * moved @ output[head, query % GROUP]
                    one = moved.norm() * matrices[s].T @ recorder.query[b, query, t]
                    if norm is not None:
                        one = before_norm(norm, row, head, one)
                    met += signs[b, query, t] * one
                    alone[head] += torch.outer(one, one)
                    counted += share * float(moved.square().sum())
                drawn[head] += torch.outer(met, met)
            keys += counted * torch.outer(row, row)
            total += counted
    assert_near(grams.importance, torch.tensor(total), 1e-5)
    assert_near(grams.keys, keys, 1e-5)
    assert_near(grams.queries, drawn, 1e-5)
    found = []
    for seed in range(300):
        grams = UnrotatedKeyGrams(output, 0.5, torch.Generator().manual_seed(seed), norm)
        grams.add(recorder, weight)
        found.append(grams.queries)
    many = torch.stack(found)
    error = (many.mean(0) - alone) / (many.std(0) / 300**0.5)
    assert float(error.square().mean()) == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("rank", [0, 2, 9, 22, 24])
def test_gains_of_unrotated_keys_are_the_error_that_is_left(rank: int) -> None:
    """Each key's weighted error, as the queries see it."""
    recorder, weight, output, _ = unrotated_problem(batch=8)
    grams = UnrotatedKeyGrams(output, 0.5, torch.Generator().manual_seed(3))
    grams.add(recorder, weight)
    stored = grams.latents()
    importance = grams._importance(recorder, weight).sum(1)
    rows = (recorder.projected_key * importance[..., None].sqrt()).flatten(0, 1)
    eye = torch.eye(HEADS * WIDTH, dtype=torch.float64)
    made = key_latent(stored, eye.unflatten(0, (HEADS, WIDTH)), rank)
    assert made.columns is None and made.latent.shape == (rank, HEADS * WIDTH)
    left = (rows @ (eye - made.key.T)).unflatten(1, (HEADS, WIDTH))
    error = float(torch.einsum("nhk,hkl,nhl->", left, grams.queries / importance.sum() * 0.25, left))
    assert float(stored["gains"][rank:].sum()) * grams.tokens == pytest.approx(error, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("rotary", [True, False])
def test_a_latent_of_every_column_is_the_keys(rotary: bool) -> None:
    recorder, weight, output = problem(batch=8)  # tokens enough for every direction
    grams = KeyGrams(output, rotary, 0.5)
    grams.add(recorder, weight)
    stored = grams.latents()
    key = torch.randn(HEADS, WIDTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = key_latent(stored, key, HEADS * WIDTH)
    assert_near(whole.key, key.flatten(0, 1), 1e-9)
    assert whole.latent.shape == (HEADS * WIDTH, HIDDEN)
    assert whole.columns == ([HEADS] * (WIDTH // 2) if rotary else None)


@pytest.mark.parametrize("rank", [2, 6, 10, 16, 22])
def test_heads_are_mixed_by_complex_factors_at_one_frequency(rank: int) -> None:
    """The keys that are made, written out from k_proj's rows and k_up_proj's factors."""
    recorder, weight, output = problem()
    grams = KeyGrams(output, True, 0.5)
    grams.add(recorder, weight)
    key = torch.randn(HEADS, WIDTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    made = key_latent(grams.latents(), key, rank)
    assert made.columns is not None and sum(made.columns) == rank // 2 and max(made.columns) <= HEADS
    assert made.up.shape == (HEADS, rank // 2, 2)
    frequencies = [f for f, count in enumerate(made.columns) for _ in range(count)]
    expected = torch.zeros(HEADS, WIDTH, HIDDEN, dtype=torch.float64)
    for head in range(HEADS):
        for column, frequency in enumerate(frequencies):
            real, imaginary = made.latent[column], made.latent[rank // 2 + column]
            a, b = made.up[head, column]
            expected[head, frequency] += a * real - b * imaginary
            expected[head, frequency + WIDTH // 2] += a * imaginary + b * real
    assert_near(made.key, expected.flatten(0, 1), 1e-12)


@pytest.mark.parametrize("rotary", [True, False])
def test_gains_are_the_error_that_is_left(rotary: bool) -> None:
    """Of every rank: the weighted squares of the score errors, averaged over the phases of the queries."""
    recorder, weight, output = problem()
    grams = KeyGrams(output, rotary, 0.5)
    grams.add(recorder, weight)
    stored = grams.latents()
    gains, half = column_gains(stored), WIDTH // 2
    assert (gains[:-1] >= gains[1:] - 1e-12).all() and gains.shape == (HEADS * WIDTH,)
    importance = grams._importance(recorder, weight)
    shares = importance.sum((0, 2)).unflatten(0, (HEADS, GROUP)).sum(1) / importance.sum()
    rows = recorder.key * importance.sum(1)[:, None, :, None].sqrt()
    rows = rows.transpose(1, 2).flatten(0, 1)  # [tokens, heads, width]
    eye = torch.eye(HEADS * WIDTH, dtype=torch.float64).unflatten(0, (HEADS, WIDTH))
    for rank in (0, 2, 8, 14, 22, 24):
        left = rows.flatten(1) @ (torch.eye(HEADS * WIDTH) - key_latent(stored, eye, rank).key.T)
        left = left.unflatten(1, (HEADS, WIDTH))
        energy = grams.queries / grams.tokens * 0.25 * (shares if rotary else shares[:, None, None])
        if rotary:
            squares = left[..., :half].square() + left[..., half:].square()  # [tokens, heads, frequencies]
            error = float((squares * energy.T / 2).sum())
        else:
            error = float(torch.einsum("nhk,hkl,nhl->", left, energy, left))
        assert float(gains[rank:].sum()) * grams.tokens == pytest.approx(error, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "shape, mechanisms, fields, turned, unturned",
    [
        ("llama", (), {}, True, True),
        ("gpt", (), {}, True, True),
        ("llama", ("gqa",), {"qk_norm": True}, False, True),
        ("llama", ("identity-key",), {}, False, False),
        (
            "llama",
            (),
            {
                "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            False,
            True,
        ),
    ],
)
def test_keys_that_can_be_latent(shape: str, mechanisms: tuple, fields: dict, turned: bool, unturned: bool) -> None:
    """After rotary positions, and before them."""
    config, _ = source(shape, *mechanisms, **fields)
    assert can_be_latent(config, config.plan.layers[1], before_rotary=False) == turned
    assert can_be_latent(config, config.plan.layers[1], before_rotary=True) == unturned
