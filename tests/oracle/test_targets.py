"""What a training step gives the model, and its loss, against loops."""

import numpy as np
import pytest
import torch
from shapes import assert_near, tiny

from leanqkv.data.objectives import EVALUATION, TRAINING, AfterPrefix, MaskedTokens, targets
from leanqkv.evaluate.loss import batch_losses

from .loss import loss
from .targets import after_prefix, masked, rows
from .test_oracle import build

SPECIAL = (*range(20), 90)
MASKS = MaskedTokens(mask=90, vocabulary=90, special=SPECIAL)
LENGTH = 16


def tokens(count: int = 400) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 90, count).astype(np.uint16)


@pytest.mark.parametrize("length", [1, 2, 3, 16, 100])
def test_masks_are_those_of_the_loops(length: int) -> None:
    text, starts = tokens(), [0, 17, 200, 5, 100]
    streams = [(4, TRAINING, number) for number in range(5)]
    batch = MASKS.batch(text, starts, length, streams)
    for row, (start, stream) in enumerate(zip(starts, streams, strict=True)):
        order, action, token = rows(MASKS.draw(stream, length))
        ids = rows(text[start : start + length])
        expected = masked(ids, order, action, [int(one) for one in token], 90, {*SPECIAL})
        assert (rows(batch["input_ids"][row]), rows(batch["labels"][row])) == expected


def test_a_sequence_of_special_tokens_has_no_mask() -> None:
    seen, labels = MASKS.hide(np.array([3, 7, 3]), MASKS.draw((0, TRAINING, 0), 3))
    assert seen.tolist() == [3, 7, 3] and labels.tolist() == [-100] * 3


def test_masks_have_their_shares() -> None:
    """Of 60,000 masked tokens of one kind: four standard errors of 80% are 0.7%, of 10% and of a position 0.5%."""
    text, length = np.full(500, 50), 100
    batch = MASKS.batch(text, [0] * 4000, length, [(0, TRAINING, number) for number in range(4000)])
    chosen = batch["labels"] != -100
    assert (chosen.sum(1) == 15).all() and (batch["labels"][chosen] == 50).all()
    assert (batch["input_ids"][~chosen] == 50).all()
    seen = batch["input_ids"][chosen]
    random = (seen != 90) & (seen != 50)
    assert abs((seen == 90).double().mean() - 0.8) < 0.007
    assert abs(random.double().mean() - 0.1 * 89 / 90) < 0.005  # one of 90 random tokens is the token itself
    assert abs(chosen.double().mean(0) - 0.15).max() < 4.5 * (0.15 * 0.85 / 4000) ** 0.5
    counts = torch.bincount(seen[random], minlength=90)
    assert counts[50] == 0 and counts[counts > 0].numel() == 89  # all but the token itself, special ones too


@pytest.mark.parametrize("length", [1, 2, 16])
def test_prefixes_are_those_of_the_loops(length: int) -> None:
    text, starts, lengths = tokens(), list(range(200)), set()
    streams = [(4, TRAINING, number) for number in range(200)]
    batch = AfterPrefix().batch(text, starts, length, streams)
    for row, (start, stream) in enumerate(zip(starts, streams, strict=True)):
        (prefix,) = AfterPrefix().draw(stream, length)
        lengths.add(prefix)
        expected = after_prefix(rows(text[start : start + length + 1]), int(prefix))
        found = tuple(rows(batch[name][row]) for name in ("input_ids", "shift_labels", "prefix_mask"))
        assert found == expected
        assert rows(batch["labels"][row]) == [
            -100 if given else one for one, given in zip(expected[0], expected[2], strict=True)
        ]
    assert lengths == set(range(1, length + 1))


@pytest.mark.parametrize("objective", [MASKS, AfterPrefix()], ids=lambda one: one.kind)
@pytest.mark.parametrize("names", [(), ("skipv1", "nonlinear-query")], ids="+".join)
def test_loss_and_gradients_of_a_step(objective, names) -> None:
    """The loss is the mean over all targets of a batch, not over sequences."""
    fields = {"task": "masked_lm"} if objective is MASKS else {"mask_type": "prefix"}
    config = tiny("gpt", *names, vocab_size=91, max_position_embeddings=LENGTH, **fields)
    model = build(config).eval()
    streams = [(0, EVALUATION, number) for number in range(3)]
    batch = objective.batch(tokens(), [0, 30, 60], LENGTH, streams)
    given = {"labels": batch["labels"]} if objective is MASKS else batch
    found = model(**{**batch, **given}).loss
    ids, labels, prefixes = rows(batch["input_ids"]), rows(batch["labels"]), [None] * 3
    if objective is not MASKS:  # the last token of a window is a target alone
        prefixes = [[*row, 0] for row in rows(batch["prefix_mask"])]
        ids = [rows(tokens()[start : start + LENGTH + 1]) for start in (0, 30, 60)]
        labels = [[-100, *row] for row in rows(batch["shift_labels"])]
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    if "model.embed_positions.weight" in tensors:  # of the position that only the oracle has, which nothing sees
        table = tensors["model.embed_positions.weight"]
        padded = {**tensors, "model.embed_positions.weight": torch.cat([table, torch.zeros_like(table[:1])])}
    expected = loss(padded, config, ids, labels, prefixes)
    assert_near(found, expected, 1e-5, "loss")
    gradients = torch.autograd.grad(found, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(tensors.values()))
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in wanted)
    for name, gradient, one in zip(tensors, gradients, wanted, strict=True):
        assert_near(gradient, one, 1e-5, f"gradient of {name}", floor)
    losses, predicted = batch_losses(model, [batch])
    assert (predicted == (targets(batch) != -100)).all()
    assert_near(losses.sum() / predicted.sum(), expected, 1e-5, "evaluated loss")
