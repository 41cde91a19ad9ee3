"""What a layer's values lose as latents.

Ours. The Gram matrix of attended values gives the best latent of every rank, a weighted low-rank approximation of W_V,
and what each further column takes away from the error of attention's output.
"""

import torch
from torch import Tensor

from ..model.config import LeanConfig
from .activations import Recorder
from .low_rank import approximate
from .sweeps import Grams

# Ranks are multiples of it where the width of the values is: the rows of a cache are then aligned.
STEP = 8


def value_width(config: LeanConfig) -> int:
    """Return the columns of a layer's values."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    return config.num_key_value_heads * config.head_dim


def step_of(width: int) -> int:
    """Return what ranks are multiples of; with rotary positions a column of a key is two, and widths are even."""
    if width > STEP and width % STEP == 0:
        return STEP
    return 1 if width % 2 else 2


def choose_ranks(gains: Tensor, columns: int, cut: list[bool]) -> list[int]:
    """Return every layer's rank: STEP columns at a time go where they take away most of the error.

    Args:
        gains: [layers, width], the error that each column takes away, descending in a layer.
        columns: of all layers together, at most.
        cut: whether a layer's values may become a latent; the others keep their width.
    """
    width = gains.shape[1]
    step = step_of(width)
    ranks = [step if may else width for may in cut]
    blocks = [
        (-float(gains[layer, start : start + step].sum()), layer)
        for layer in range(len(gains))
        if cut[layer]
        for start in range(step, width, step)
    ]
    for _, layer in sorted(blocks)[: (columns - sum(ranks)) // step]:
        ranks[layer] += step
    return ranks


class ValueGram(Grams):
    """The Gram matrix [width, width] of a layer's values under the patterns of every head, in float64 on the CPU."""

    def __init__(self, width: int, bias: Tensor | None):
        self.total = torch.zeros(width, width, dtype=torch.float64)
        self._bias = bias

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a batch; `weight` [batch, length] multiplies each token's values."""
        values = recorder.values.transpose(1, 2).flatten(2)  # [batch, length, width]
        if self._bias is not None:  # it stays beside the latent: every head's patterns add up to 1
            values = values - self._bias.to(values)
        for head in range(recorder.patterns.shape[1]):
            attended = (recorder.patterns[:, head] @ values * weight[..., None]).flatten(0, 1)
            self.total += (attended.T @ attended).cpu().double()


def value_latents(grams: ValueGram, output: Tensor, tokens: int) -> dict[str, Tensor]:
    """Return the best latent of every rank (see `approximate`), and the error that each of its columns takes away.

    output: W_O as [heads, group, head_dim, hidden_size]; tokens: how many the sums are over.
    """
    weights = torch.einsum("hgkd,hgld->hkl", output, output)
    combine, restore, gains = approximate(grams.total, torch.block_diag(*weights))
    return {"combine": combine.contiguous(), "restore": restore.contiguous(), "gains": gains / tokens}
