"""Bases of whole heads: the same latents, what a head reads, and the noise against errors written out."""

import pytest
import torch
from shapes import assert_near
from torch import Tensor

from leanqkv.convert import latent_basis
from leanqkv.convert.latent_basis import MOST_NOISE, leverage, whole_heads_first
from leanqkv.convert.latent_keys import key_latent, places_of
from leanqkv.convert.low_rank import approximate
from leanqkv.model.latent_heads import LatentKeys

HEADS, SIZE, EPS = 4, 3, torch.finfo(torch.float64).eps


def positive(width: int, seed: int, dtype: torch.dtype) -> Tensor:
    draw = torch.randn(width, 3 * width, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return draw @ draw.mH


def problem(rank: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """Sums over heads of which the first two are nearly alike, what their errors cost, and the best latent."""
    gram = positive(HEADS * SIZE, seed, dtype)
    mix = torch.eye(HEADS * SIZE, dtype=dtype)
    mix[SIZE : 2 * SIZE, :SIZE] = 2 * torch.eye(SIZE, dtype=dtype)
    mix[SIZE : 2 * SIZE, SIZE : 2 * SIZE] *= 0.01
    gram = mix @ gram @ mix.mH
    weight = torch.block_diag(*(positive(SIZE, seed + 1 + head, dtype) for head in range(HEADS)))
    combine, restore, gains = approximate(gram, weight)
    return gram, weight, combine[:, :rank], restore[:rank], gains[:rank]


ORDER = [torch.arange(head * SIZE, head * SIZE + SIZE) for head in range(HEADS)]
both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


@both
@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8, 10, 11, 12])
def test_it_is_the_same_latent_and_whole_heads_are_their_columns(rank: int, dtype: torch.dtype) -> None:
    _, _, *best = problem(rank, dtype)
    combine, restore, count = whole_heads_first(*best, ORDER)
    assert_near(combine @ restore, best[0] @ best[1], 1e4 * EPS)
    for place in range(count):
        rows = restore.mT[place * SIZE : (place + 1) * SIZE]
        assert (rows == torch.eye(HEADS * SIZE, rank, dtype=dtype)[place * SIZE : (place + 1) * SIZE]).all()


def noise_of(gram: Tensor, weight: Tensor, combine: Tensor, restore: Tensor) -> float:
    """What an error of each column, as large as the column, adds to the squared error of the output; column by column.
    A value is a row here: `x combine restore`."""
    total = 0.0
    for column in range(combine.shape[1]):
        size = (combine[:, column].conj() @ gram @ combine[:, column]).real
        total += float(size * (restore[column] @ weight @ restore[column].conj()).real)
    return total


@both
@pytest.mark.parametrize("rank", [4, 7, 9, 11])
def test_the_noise_is_what_errors_of_the_columns_cost(rank: int, dtype: torch.dtype, monkeypatch) -> None:
    """Of the basis that is taken it is within the bound, and of one whole head more it is not."""
    gram, weight, *best = problem(rank, dtype)
    monkeypatch.setattr(latent_basis, "MOST_NOISE", float("inf"))
    before, found = noise_of(gram, weight, *best[:2]), []
    for most in range(1, rank // SIZE + 1):
        combine, restore, count = whole_heads_first(*best, ORDER[:most])
        assert count == most
        noise = latent_basis._basis(best[1].mT[torch.cat(ORDER[:most])], best[2])[2]
        found.append(noise)
        assert noise == pytest.approx(noise_of(gram, weight, combine, restore) / before, rel=1e-9)
    monkeypatch.undo()
    within = [noise <= MOST_NOISE for noise in found]
    count = whole_heads_first(*best, ORDER)[2]
    assert count == max((place + 1 for place, fits in enumerate(within) if fits), default=0)


def test_leverage_is_all_of_a_head_that_a_latent_holds() -> None:
    _, _, combine, restore, _ = problem(HEADS * SIZE)
    assert_near(leverage(combine, restore, HEADS), torch.full((HEADS,), float(SIZE), dtype=torch.float64), 1e4 * EPS)
    _, _, combine, restore, _ = problem(7)
    held = leverage(combine, restore, HEADS)
    assert float(held.sum()) == pytest.approx(7) and (held > 0).all() and (held < SIZE + 1e-9).all()


def test_heads_without_energy_are_not_whole() -> None:
    """Dead heads, whose columns would be zero, and a layer of nothing else."""
    gram, weight = torch.zeros(12, 12).double(), torch.eye(12).double()
    gram[:6, :6] = positive(6, 0, torch.float64)
    combine, restore, gains = approximate(gram, weight, 6)
    found = whole_heads_first(combine, restore, gains, ORDER)
    assert_near(found[0] @ found[1] @ gram, combine @ restore @ gram, 1e4 * EPS)
    combine, restore, gains = approximate(torch.zeros(12, 12).double(), weight, 6)
    assert whole_heads_first(combine, restore, gains, ORDER)[2] == 0


def test_a_head_reads_its_own_columns_of_a_frequency_and_others_all() -> None:
    """Where a frequency has a column for every head, each head reads one."""
    frequencies, heads = 5, 3
    dtype = torch.complex128
    best = [approximate(positive(heads, seed, dtype), torch.eye(heads, dtype=dtype)) for seed in range(frequencies)]
    stored = {"gains": torch.stack([gains for *_, gains in best])}
    for name, place in (("combine", 0), ("restore", 1)):
        stored[name] = torch.view_as_real(torch.stack([of[place].resolve_conj() for of in best]))
    each = torch.eye(heads * 2 * frequencies, dtype=torch.float64).unflatten(0, (heads, -1))
    made = key_latent(stored, each, 2 * 11)
    columns = LatentKeys(columns=tuple(made.columns or ()), own=tuple(made.own or ()))
    assert columns.frequencies is not None and made.columns is not None and made.own is not None
    assert heads in made.columns and min(made.columns) < heads
    read = (made.up != 0).any(-1)
    for frequency, (count, own) in enumerate(zip(made.columns, made.own, strict=True)):
        here = torch.tensor([f == frequency for f in columns.frequencies])
        assert own == heads if count == heads else own <= count
        assert sorted(read[:, here].sum(1).tolist()) == [1] * own + [count] * (heads - own)
    first = read[:, : sum(number > 0 for number in made.own)].sum(1)
    assert (first == sum(number > 0 for number in made.own)).sum() == 1  # one head owns the first column of each


def test_columns_in_turns() -> None:
    columns, own = (2, 3, 0, 1), (1, 3, 0, 0)
    frequencies = LatentKeys(columns=columns, own=own).frequencies
    assert frequencies == (0, 1, 1, 1, 0, 3)
    assert LatentKeys(columns=columns).frequencies == (0, 0, 1, 1, 1, 3)
    by_frequency = [f for f, count in enumerate(columns) for _ in range(count)]
    assert tuple(by_frequency[place] for place in places_of(columns, own)) == frequencies
