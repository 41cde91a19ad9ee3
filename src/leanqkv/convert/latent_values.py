"""The error of attention's output that latent values cause.

Ours. The Gram matrix of attended values gives the best latent of every rank, a weighted low-rank approximation of W_V,
and what each further column takes away from the error of attention's output. Where values are made of the keys too, it
is that of what the keys do not explain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.config import LeanConfig
from .activations import Recorder
from .low_rank import FEW, LARGE, approximate

# Ranks are multiples of it where the width of the values is: the rows of a cache are then aligned.
STEP = 8
# How much the regression of the values on the keys is pulled towards none, as a share of the mean square of a key.
KEY_RIDGE = 1e-6
# A smaller share of the values is next to nothing.
NOTHING = 1e-6


def value_width(config: LeanConfig) -> int:
    """Return the columns of a layer's values."""
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


@dataclass(eq=False)
class ValueGram:
    """The Gram matrix of a layer's values under the patterns of every head, in float64 on the CPU.

    Where head h makes the row a_h of a token's values, it is the sum of `a_h^T a_h` over heads and tokens. One product
    for each head costs more than the layer does, so that one of their sum with random signs z takes its place:
    `E[(sum_h z_h a_h)^T (sum_h z_h a_h)] = sum_h a_h^T a_h`, since `E[z_h z_g]` is 0 for two heads and 1 for one
    (Hutchinson 1990, https://doi.org/10.1080/03610919008812866). The squared error of a token's matrix S, summed over
    its entries, is `(tr S)^2 + |S|^2 - 2 sum_h |a_h|^4` on average, and independent of the other tokens' errors.

    Args:
        width: columns of the values; bias: theirs, [width]; key_width: columns of the keys beside them, if any.
        inputs: columns of what both are made of, if the matrix is of these: the layer's input, and ones if it has one
            column more than that.
        generator: of the signs; None: one product for each head.

    Attributes:
        total: [columns, columns], of the inputs, or of the values and behind them the keys, before rotary positions.
    """

    width: int
    bias: Tensor | None
    key_width: int = 0
    inputs: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        columns = self.inputs or self.width + self.key_width
        self.total = torch.zeros(columns, columns, dtype=torch.float64)

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries; `weight` [batch, queries] multiplies each token's values."""
        columns = self._columns(recorder)
        for pattern in self._mixed(recorder.patterns):
            attended = (pattern @ columns * weight[..., None]).flatten(0, 1)
            self.total += (attended.T @ attended).cpu()

    def _columns(self, recorder: Recorder) -> Tensor:
        if self.inputs:
            missing = self.inputs - recorder.inputs.shape[-1]
            return torch.nn.functional.pad(recorder.inputs, (0, missing), value=1.0)
        columns = recorder.values.transpose(1, 2).flatten(2)  # [batch, length, width]
        if self.bias is not None:  # it stays beside the latent: every head's patterns add up to 1
            columns = columns - self.bias.to(columns)
        return torch.cat((columns, recorder.projected_key), dim=-1) if self.key_width else columns

    def _mixed(self, patterns: Tensor) -> Sequence[Tensor]:
        """The patterns of every head, or their sum with random signs; [batch, queries, keys] each."""
        if self.generator is None:
            return patterns.unbind(1)
        signs = 2 * torch.randint(2, patterns.shape[:3], generator=self.generator) - 1
        return [(patterns * signs[..., None].to(patterns)).sum(1)]


@dataclass(frozen=True)
class ValueLatents:
    """The best latents of a layer's values v, of every rank r: `(v - k from_keys) combine[:, :r]`, where k is what is
    cached of the keys. The values that are made of it are `latent restore[:r] + k from_keys`.

    Attributes:
        from_keys: [key columns, width]; no rows where values do not read keys.
        combine: [width, the largest rank]; restore: [the largest rank, width].
        gains: the error that each column takes away, descending.
    """

    from_keys: Tensor
    combine: Tensor
    restore: Tensor
    gains: Tensor


def value_latents(gram: Tensor, output: Tensor, keys: Tensor | None = None, rank: int | None = None) -> ValueLatents:
    """Return the best latents of every rank.

    Args:
        gram: `ValueGram.total`.
        output: W_O as [heads, group, head_dim, hidden_size].
        keys: [key width, key columns], what is cached of the keys; None: all of them, where the gram has them.
        rank: the largest one that is asked for; None: all.
    """
    weight = torch.einsum("hgkd,hgld->hkl", output, output)
    from_keys, rest = _explained(gram, weight.shape[0] * weight.shape[1], keys)
    return ValueLatents(from_keys, *approximate(rest, weight, rank))


def value_gains(gram: Tensor, output: Tensor) -> Tensor:
    """Return the error that each column of a latent takes away, [width], descending, of `gram` and `output` as above.

    Keys as wide as the stream hold the values. Where they are wide and next to nothing is left behind the first
    columns, the others share it evenly: to tell them apart would take longer than a forward pass.
    """
    weight = torch.einsum("hgkd,hgld->hkl", output, output)
    width = weight.shape[0] * weight.shape[1]
    _, rest = _explained(gram, width, None)
    if width >= LARGE:
        first = approximate(rest, weight, width // FEW)[2]
        left = _weighed(rest, weight) - float(first.sum())
        if left <= NOTHING * _weighed(gram[:width, :width], weight):
            others = width - len(first)
            return torch.cat((first, torch.full((others,), max(left, 0.0) / others, dtype=first.dtype)))
    return approximate(rest, weight)[2]


def _weighed(gram: Tensor, weight: Tensor) -> float:
    """The error of attention's output without these values; weight: [heads, head_dim, head_dim]."""
    heads, size, _ = weight.shape
    blocks = gram.unflatten(0, (heads, size)).unflatten(2, (heads, size)).diagonal(dim1=0, dim2=2)
    return float((blocks.permute(2, 0, 1) * weight).sum())


def _explained(gram: Tensor, width: int, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """The map from keys to values, [key columns, width], and the Gram matrix of what is left of the values."""
    values, both, squares = gram[:width, :width], gram[width:, :width], gram[width:, width:]
    if keys is not None:
        both, squares = keys.T @ both, keys.T @ squares @ keys
    from_keys = both
    if len(both):
        # Keys that are all zero explain nothing: whatever is positive will do.
        pulled = squares.clone()
        pulled.diagonal().add_(KEY_RIDGE * squares.diagonal().mean() or 1.0)
        from_keys = torch.linalg.solve(pulled, both)
        del pulled
    explained = from_keys.T @ both
    rest = values - explained - explained.T + from_keys.T @ squares @ from_keys
    return from_keys, (rest + rest.T) / 2
