"""The error of attention's output that latent values cause.

Ours. The Gram matrix of attended values gives the best latent of every rank, a weighted low-rank approximation of W_V,
and what each further column takes away from the error of attention's output. Where values are made of the keys too, it
is that of what the keys do not explain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.config import LeanConfig
from .activations import Recorder
from .low_rank import approximate
from .sweeps import Grams

# Ranks are multiples of it where the width of the values is: the rows of a cache are then aligned.
STEP = 8
# How much the regression of the values on the keys is pulled towards none, as a share of the mean square of a key.
KEY_RIDGE = 1e-6


def value_width(config: LeanConfig) -> int:
    """Return the columns of a layer's values."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    return config.num_key_value_heads * config.head_dim


def step_of(width: int) -> int:
    """Return what ranks are multiples of; with rotary positions a column of a key is two, and widths are even."""
    if width > STEP and width % STEP == 0:
        return STEP
    return 1 if width % 2 else 2


def choose_ranks(gains: Tensor, budget: int, cut: list[bool], costs: list[int]) -> list[int]:
    """Return every layer's rank: STEP columns at a time go where they take away most of the error for their cost.

    Args:
        gains: [layers, width], the error that each column takes away, descending in a layer.
        budget: what the columns of all layers may cost together.
        cut: whether a layer's values may become a latent; the others keep their width.
        costs: of a column of every layer.
    """
    width = gains.shape[1]
    step = step_of(width)
    ranks = [step if may else width for may in cut]
    left = budget - sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))
    blocks = [
        (-float(gains[layer, start : start + step].sum()) / costs[layer], layer)
        for layer in range(len(gains))
        if cut[layer]
        for start in range(step, width, step)
    ]
    for _, layer in sorted(blocks):
        if step * costs[layer] <= left:
            ranks[layer] += step
            left -= step * costs[layer]
    return ranks


class ValueGram(Grams):
    """The Gram matrix of a layer's values under the patterns of every head, in float64 on the CPU.

    Attributes:
        total: [width, width]; with keys [width + key width, ...], the keys behind the values, before rotary positions.
    """

    def __init__(self, width: int, bias: Tensor | None, key_width: int = 0):
        self.total = torch.zeros(width + key_width, width + key_width, dtype=torch.float64)
        self._bias, self._with_keys = bias, key_width > 0

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries; `weight` [batch, queries] multiplies each token's values."""
        columns = recorder.values.transpose(1, 2).flatten(2)  # [batch, length, width]
        if self._bias is not None:  # it stays beside the latent: every head's patterns add up to 1
            columns = columns - self._bias.to(columns)
        if self._with_keys:
            columns = torch.cat((columns, recorder.projected_key), dim=-1)
        for head in range(recorder.patterns.shape[1]):
            attended = (recorder.patterns[:, head] @ columns * weight[..., None]).flatten(0, 1)
            self.total += (attended.T @ attended).cpu().double()


@dataclass(frozen=True)
class ValueLatents:
    """The best latents of a layer's values v, of every rank r: `(v - k from_keys) combine[:, :r]`, where k is what is
    cached of the keys. The values that are made of it are `latent restore[:r] + k from_keys`.

    Attributes:
        from_keys: [key columns, width]; no rows where values do not read keys.
        combine, restore: [width, width].
        gains: [width], the error that each column takes away, descending.
    """

    from_keys: Tensor
    combine: Tensor
    restore: Tensor
    gains: Tensor


def value_latents(gram: Tensor, output: Tensor, keys: Tensor | None = None) -> ValueLatents:
    """Return the best latents of every rank.

    Args:
        gram: `ValueGram.total`.
        output: W_O as [heads, group, head_dim, hidden_size].
        keys: [key width, key columns], what is cached of the keys; None: all of them, where the gram has them.
    """
    weight = torch.block_diag(*torch.einsum("hgkd,hgld->hkl", output, output))
    width = len(weight)
    values, both, squares = gram[:width, :width], gram[width:, :width], gram[width:, width:]
    if keys is not None:
        both, squares = keys.T @ both, keys.T @ squares @ keys
    from_keys = both
    if len(both):
        # Keys that are all zero explain nothing: whatever is positive will do.
        pull = (KEY_RIDGE * squares.diagonal().mean() or 1.0) * torch.eye(len(squares), dtype=squares.dtype)
        from_keys = torch.linalg.solve(squares + pull, both)
    explained = from_keys.T @ both
    rest = values - explained - explained.T + from_keys.T @ squares @ from_keys
    combine, restore, gains = approximate((rest + rest.T) / 2, weight)
    return ValueLatents(from_keys, combine, restore, gains)
