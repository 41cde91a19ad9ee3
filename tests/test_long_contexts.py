"""Long sequences at bounded memory: the largest tensor that a calibration or a score makes, and the same result."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from converting import source
from pairing import model, text
from reducing import EPS, KINDS, SMALL, sample_of, sweep
from shapes import assert_near, randomize, tiny, tokens
from text_losses import strided_losses
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leanqkv import LeanError, LeanForCausalLM
from leanqkv.cache_bits import CacheBits
from leanqkv.convert import activations
from leanqkv.convert.calibrated import calibrated
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.targets import SkipV1Options
from leanqkv.data.objectives import MaskedTokens
from leanqkv.evaluate import loss, strided
from leanqkv.evaluate.paired import mean_over_windows, paired_figures, paired_scores, spread_windows
from leanqkv.evaluate.states import cached_states
from leanqkv.evaluate.strided import by_position, strided_windows, window_losses
from leanqkv.model.masked_lm import LeanForMaskedLM

LENGTH, HEADS, VOCABULARY = 128, 4, 512


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has that is made while the body runs."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


def largest(body: Callable[[], Any]) -> tuple[Any, int]:
    with Largest() as seen:
        return body(), seen.numbers


def conversions(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    """One sequence at a time, of models in which some layers or all have a window."""
    fields = SMALL | {"sliding_window": 9, "max_position_embeddings": LENGTH}
    mixed, windows = source("llama", **fields, window_layers=[1]), source("llama", **fields)
    sample = sample_of(mixed[0], 4, LENGTH)

    def swept(kind: str) -> list[Any]:
        return [one.tensors for one in sweep(mixed, sample, tmp_path / kind, KINDS[kind](mixed), batch_size=1)]

    made: dict[str, Callable[[], Any]] = {kind: lambda kind=kind: swept(kind) for kind in KINDS}
    return made | {"first-layer values": lambda: [calibrated(*windows, sample, SkipV1Options(batch_size=1))[1]]}


@pytest.mark.long_cases
@pytest.mark.parametrize("kind", [*KINDS, "first-layer values"])
def test_patterns_are_made_a_run_of_queries_at_a_time(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Of no layer's heads are all patterns in memory; the sums are the same, in another order."""
    convert = conversions(tmp_path)[kind]
    whole, most = largest(convert)
    assert most >= HEADS * LENGTH**2
    monkeypatch.setattr(activations, "PATTERNS_AT_A_TIME", HEADS * LENGTH * 5)
    runs, most = largest(convert)
    assert most < HEADS * LENGTH**2 / 3  # a mask of one head, for windows, is whole
    for one, other in zip(whole, runs, strict=True):
        for name, tensor in one.items():
            assert_near(other[name].double(), tensor.double(), 1e4 * EPS, name)


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "quantized"])
def test_logits_are_made_a_piece_at_a_time(task: str, monkeypatch) -> None:
    """Windows of all positions need no more than a narrow piece of their logits; the losses are the same."""
    own = "masked_lm" if task == "masked_lm" else "causal_lm"
    config = tiny("llama", task=own, vocab_size=VOCABULARY, max_position_embeddings=2 * LENGTH)
    scored = randomize((LeanForMaskedLM if own == "masked_lm" else LeanForCausalLM)(config))
    ids, length = tokens(1, 10 * LENGTH + 1, VOCABULARY)[0].numpy(), 2 * LENGTH
    states = cached_states(CacheBits(8, 4)) if task == "quantized" else None
    drawn = MaskedTokens(mask=0, vocabulary=VOCABULARY, special=())

    def score() -> Tensor:
        if own == "masked_lm":
            windows = spread_windows(len(ids), length, 5)
            return window_losses(scored, ids, windows, length, objective=drawn, batch_size=4)[0]
        return strided_losses(scored, ids[: 4 * length + 1], context_length=length, stride=length, states=states)

    whole, most = largest(score)
    assert most >= 0.14 * 4 * length * VOCABULARY
    monkeypatch.setattr(loss, "LOGITS_AT_A_TIME", 8 * VOCABULARY)
    pieces, most = largest(score)
    assert most <= 4 * length * config.intermediate_size  # the MLP's, of four windows
    assert_near(pieces, whole, 10 * EPS)


def test_scores_by_position(monkeypatch) -> None:
    """By hand, of one model and of two: each token's position in its window, and windows as units of the interval."""
    monkeypatch.setattr(strided, "FIRST_POSITIONS", 8)
    before, after, ids = model(0), model(1), text(120)
    windows = strided_windows(len(ids), 32, 12)
    [scores] = paired_scores(before, after, ids, windows, 32)
    figures = paired_figures(scores, None)
    losses, positions = window_losses(after, ids, windows, 32)
    by_hand = [(number, place) for number, (_, count) in enumerate(windows) for place in range(32 - count, 32)]
    assert positions.tolist() == scores.position.tolist() == [place for _, place in by_hand]
    alone = by_position(positions, lambda here: {"loss": losses[here].mean().item()})
    bounds = [(0, 8), (8, 16), (16, 32)]
    assert [(part["from"], part["to"]) for part in figures["by_position"]] == bounds
    for part, one, (start, stop) in zip(figures["by_position"], alone, bounds, strict=True):
        rows = [row for row, (_, place) in enumerate(by_hand) if start <= place < stop]
        assert part["tokens"] == one["tokens"] == len(rows)
        assert part["after"] == one["loss"] == pytest.approx(losses[rows].mean().item(), abs=1e-12)
        units = torch.tensor([by_hand[row][0] for row in rows])
        assert part["loss_difference"] == mean_over_windows((scores.after - scores.before)[rows], units)
    assert figures["by_position"][0]["loss_difference"]["half_width"] is None  # of the first window alone
    monkeypatch.setattr(strided, "FIRST_POSITIONS", 32)
    assert "by_position" not in paired_figures(scores, None)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 2, 9, 200])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_runs_of_queries_see_what_all_queries_see(window: int | None, rows: int, monkeypatch) -> None:
    """Each query's pattern over its keys, and what it attends to, are those of one run with a mask over everything."""
    config, tensors = source("llama", "gqa", sliding_window=window, max_position_embeddings=LENGTH)
    layers = activations.Layers(config, tensors, LENGTH, torch.device("cpu"))
    stream = torch.randn(2, LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(activations, "PATTERNS_AT_A_TIME", 2 * config.num_attention_heads * LENGTH * rows)
    block = layers.block(0)
    runs = list(layers.attend(block, 0, stream)[1])
    seen = torch.ones(LENGTH, LENGTH).tril().triu(1 - (window or LENGTH)).bool()
    # The last keys of a run are those of its own queries.
    last = [(run, slice(-run.query.shape[2], None)) for run in runs]
    query, key, values = (
        torch.cat([getattr(run, name)[:, :, own] for run, own in last], dim=2) for name in ("query", "key", "values")
    )
    group = query.shape[1] // key.shape[1]
    key, values = (states.repeat_interleave(group, 1) for states in (key, values))
    scores = query @ key.mT * config.head_dim**-0.5
    patterns = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    for run in runs:
        assert run.query.shape[2] <= rows and run.projected_key.shape[1] == run.key.shape[2]
        whole = torch.zeros_like(patterns[:, :, run.queries])
        whole[..., run.keys] = run.patterns
        assert_near(whole, patterns[:, :, run.queries], 10 * EPS)
    heads = torch.cat([run.heads for run in runs], dim=1)
    assert_near(heads, (patterns @ values).transpose(1, 2), 10 * EPS)
    attended = block.self_attn.o_proj(heads.flatten(2))
    assert_near(layers.run(block, 0, stream, attended), layers.run(block, 0, stream), 100 * EPS)


def test_a_calibration_text_shorter_than_a_sequence() -> None:
    text = SimpleNamespace(train_tokens=30, vocab_size=97)
    with pytest.raises(LeanError, match=r"^the calibration text has 30 tokens, fewer than one sequence of 64\."):
        calibration_tokens(text, tiny("gpt"), 128, 64)
