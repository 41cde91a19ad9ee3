"""Attention with block Hadamard products against loops, and a check that notices a broken construction."""

import math

import pytest
import torch
from checking import FLOAT, failures, normal

from experiments.theory.hadamard import statement as hadamard
from experiments.theory.hadamard.check import MASKS, make_mask


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
        attended = apply(a, f, heads)
        return torch.cat(
            [attended[:, : -(attended.shape[1] // heads)], 0 * attended[:, -(attended.shape[1] // heads) :]], 1
        )

    monkeypatch.setattr(hadamard, "apply_blocks", drop)
    assert "head by head" in failures("hadamard")


def test_a_softmax_over_all_heads_at_once_fails(monkeypatch):
    def together(a, mask, heads):
        return torch.softmax(a + mask.repeat(1, heads), -1)

    monkeypatch.setattr(hadamard, "softmax_blocks", together)
    assert "head by head" in failures("hadamard")
