"""Scores of two models on one text, window by window, and the interval of their difference."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from pairing import VOCABULARY, model, text
from scipy import stats
from torch.nn import functional as F

from leanqkv import LeanError
from leanqkv.evaluate import paired
from leanqkv.evaluate.paired import mean_over_windows, paired_figures, paired_scores, spread_windows
from leanqkv.evaluate.strided import strided_windows

ROUNDING = 1e-12


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("at_a_time, scaling", [(1, 1.0), (7 * VOCABULARY, 1.0), (2**25, 1.0), (2**25, 8.0)])
@pytest.mark.parametrize("compared", [1, 5 * VOCABULARY, 2**19])
def test_scores_are_those_of_all_logits_at_once(monkeypatch, at_a_time, scaling, batch_size, compared):
    monkeypatch.setattr(paired, "COMPARED_AT_A_TIME", compared)
    monkeypatch.setattr(paired, "LOGITS_AT_A_TIME", at_a_time)
    before, after, tokens, done = model(0, logits_scaling=scaling), model(1), text(), []
    windows = strided_windows(len(tokens), 32, 16)
    progress = lambda *at: done.append(at)  # noqa: E731
    [scores] = paired_scores(before, after, tokens, windows, 32, batch_size=batch_size, progress=progress)
    expected = []
    for start, scored in windows:
        ids = torch.from_numpy(tokens[start : start + 33].astype(np.int64))
        first, second = (m(ids[None, :-1]).logits[0, -scored:].log_softmax(-1) for m in (before, after))
        targets = ids[1:][-scored:]
        kl = F.kl_div(second, first, log_target=True, reduction="none").sum(-1)
        same = (first.argmax(-1) == second.argmax(-1)).double()
        expected.append(torch.stack([F.nll_loss(x, targets, reduction="none") for x in (first, second)] + [kl, same]))
    found = torch.stack([scores.before, scores.after, scores.divergence, scores.agreement])
    torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=0, atol=ROUNDING)
    assert scores.window.tolist() == [number for number, (_, n) in enumerate(windows) for _ in range(n)]
    assert done[-1] == (149, 149) and scores.agreement.mean() < 1


def test_a_model_loses_nothing_against_itself():
    one = model()
    [scores] = paired_scores(one, one, text(), spread_windows(150, 32, 4), 32)
    figures = paired_figures(scores, 400)
    nothing = {"mean": 0.0, "half_width": 0.0}
    assert (figures["loss_difference"], figures["divergence"]) == (nothing, nothing)
    assert figures["agreement"] == {"mean": 1.0, "half_width": 0.0}
    assert figures["before"] == figures["after"] and figures["windows"] == 4 and figures["before"]["tokens"] == 128


def test_intervals_are_students_over_windows():
    values = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    window = torch.repeat_interleave(torch.arange(6), 10)
    means = values.view(6, 10).mean(1).numpy()
    _, high = stats.t.interval(0.95, 5, scale=stats.sem(means))
    found = mean_over_windows(values, window)
    assert found["mean"] == pytest.approx(means.mean()) and found["half_width"] == pytest.approx(high)
    assert mean_over_windows(values, torch.zeros(60, dtype=torch.int64))["half_width"] is None
    # Of windows of different lengths, the interval holds the truth as often as it says.
    random, inside = np.random.default_rng(0), 0
    window = torch.repeat_interleave(torch.arange(20), torch.tensor([3, 17] * 10))
    for _ in range(400):
        shared = torch.from_numpy(random.normal(size=20))[window]
        found = mean_over_windows(shared + torch.from_numpy(random.normal(size=200)), window)
        inside += abs(found["mean"]) <= found["half_width"]
    # The spread of the share among 400 draws is 1.1%; few windows make the interval a little too narrow.
    assert 0.90 < inside / 400 < 0.985


@pytest.mark.parametrize(
    "tokens, length, count, expected", [(101, 10, 10, 10), (101, 10, 3, 3), (50, 10, 9, 4), (8, 10, 5, 1)]
)
def test_windows_are_spread_and_do_not_overlap(tokens, length, count, expected):
    windows = spread_windows(tokens, length, count)
    starts, scored = zip(*windows, strict=True)
    size = min(length, tokens - 1)
    assert len(windows) == expected and set(scored) == {size}
    assert starts[0] == 0 and (expected == 1 or starts[-1] + size + 1 == tokens)
    assert all(later - earlier >= size for earlier, later in pairwise(starts))


def test_scores_that_are_not_finite_are_refused(monkeypatch):
    broken = model()
    broken.lm_head.weight.data[5] = math.nan
    with pytest.raises(LeanError, match="not finite in the window at token 1"):
        paired_scores(model(), broken, text(), [(0, 32)], 32)
    monkeypatch.setattr(paired, "LOGITS_AT_A_TIME", 1)  # one token at a time

    def states(model, ids):
        return paired.last_states(model, ids).index_fill(1, torch.tensor([0]), math.nan)

    with pytest.raises(LeanError, match="not finite in the window at token 4"):
        paired_scores(model(), model(), text(), [(3, 32)], 32, states=(paired.last_states, [states]))
