"""Least squares from Gram matrices: W_V of the kept heads and W_O of all in a layer, and the values that are lent."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class System:
    """Minimises `|T - sum_h,q P_hq X V_h O_hq - sum_p,q P_pq V1_p O_pq - 1 b|^2` over V of the kept heads, all O, b.

    Columns of the Gram matrix: for every place and each of its `group` query heads, `wide` for a kept head, `width` for
    another; one constant at the end where there is a bias. `strength` times the mean of its diagonal is what a step
    away from the weights at the start costs.
    """

    def __init__(self, gram: Tensor, cross: Tensor, size: float, kept: int, places: int, group: int, strength: float):
        self.gram, self.cross, self.size = gram, cross, size
        self.kept, self.places, self.group, self.strength = kept, places, group, strength

    def solve(
        self, value: Tensor, output: Tensor, bias: Tensor | None, sweeps: int
    ) -> tuple[Tensor, Tensor, Tensor | None, float]:
        """From where to start: value [kept, wide, width], output [places, group, width, d], bias [d] or None.

        Returns value, output, the bias or None, and the share of the target that is missed.
        """
        missed = torch.inf
        first, start = value, output.flatten(0, 2)
        if bias is not None:
            start = torch.cat((start, bias[None]))
        for sweep in range(max(1, sweeps)):
            into = self._into(value, len(start))
            gram, cross = into.gram(self.gram), into.reduce(self.cross)
            flat = ridge(gram, cross, start, self.strength)
            found = missed_square(self.size, gram, cross, flat) / (self.size or 1)
            if sweep + 1 >= sweeps or missed - found < 1e-4 * found:
                break
            missed = found
            value = self._values(value, first, flat)
        count = self.places * self.group * output.shape[2]
        return value, flat[:count].view_as(output), None if bias is None else flat[count], found

    def _into(self, value: Tensor, seen: int) -> "BlockDiagonal":
        """From all columns to the `seen` that W_O sees: V for the kept heads, the others as they are."""
        kept = value.repeat_interleave(self.group, dim=0)
        return BlockDiagonal(*kept, seen - len(kept) * value.shape[2])

    def _values(self, value: Tensor, first: Tensor, flat: Tensor) -> Tensor:
        """One head after another, each exactly: V solves `sum_q,r A_qr V O_r O_q^T = sum_q B_q O_q^T`."""
        wide, width = value.shape[1:]
        value = value.clone()
        for place in range(self.kept):
            before = place * self.group
            outputs = [flat[i * width : (i + 1) * width] for i in range(before, before + self.group)]
            # What is left for this head beyond the value it started with: the step away from that is pulled to zero.
            others = value.clone()
            others[place] = first[place]
            right = left_over(self.gram, self.cross, self._into(others, len(flat)), flat, before * wide, wide, outputs)
            mine = slice(before * wide, (before + self.group) * wide)
            step = _value([(self.gram[mine, mine], outputs)], right, value[place] - first[place], self.strength)
            value[place] = first[place] + step
        return value


class BlockDiagonal:
    """A matrix of blocks, without its zeros.

    Args:
        blocks: from the upper left on; a number is an identity of that size.
    """

    def __init__(self, *blocks: Tensor | int):
        self.blocks = blocks
        self.rows = [b if isinstance(b, int) else b.shape[0] for b in blocks]
        self.columns = [b if isinstance(b, int) else b.shape[1] for b in blocks]

    def expand(self, matrix: Tensor) -> Tensor:
        """D @ matrix."""
        parts = zip(self.blocks, matrix.split(self.columns), strict=True)
        return torch.cat([part if isinstance(block, int) else block @ part for block, part in parts])

    def reduce(self, matrix: Tensor) -> Tensor:
        """D^T @ matrix."""
        parts = zip(self.blocks, matrix.split(self.rows), strict=True)
        return torch.cat([part if isinstance(block, int) else block.T @ part for block, part in parts])

    def gram(self, gram: Tensor) -> Tensor:
        """D^T @ gram @ D, of a symmetric one."""
        return self.reduce(self.reduce(gram).T)


def missed_square(size: float, gram: Tensor, cross: Tensor, weight: Tensor) -> float:
    """`|T - X W|^2` from the square of T, `gram = X^T X` and `cross = X^T T`."""
    return size + float((weight * (gram @ weight - 2 * cross)).sum())


def left_over(
    gram: Tensor, cross: Tensor, into: BlockDiagonal, flat: Tensor, start: int, wide: int, outputs: list[Tensor]
) -> Tensor:
    """[wide, width]: `sum over q of X_q^T (T - X D W) O_q^T`, X_q being `wide` columns each, from column `start` on."""
    total = torch.zeros(())
    for q, output in enumerate(outputs):
        rows = slice(start + q * wide, start + (q + 1) * wide)
        # In this order nothing is as large as the Gram matrix times all of W.
        total = total + cross[rows] @ output.T - gram[rows] @ into.expand(flat @ output.T)
    return total


def ridge(gram: Tensor, cross: Tensor, start: Tensor, strength: float) -> Tensor:
    """The W that minimises `|T - X W|^2 + damping |W - start|^2` from `gram = X^T X` and `cross = X^T T`; any leading
    dimensions. Damping is `strength` times the mean of the Gram matrix's diagonal; without any X, W is the start."""
    damping = strength * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    damping = torch.where(damping > 0, damping, 1)[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype)
    return start + torch.linalg.solve(gram + damping, cross - gram @ start)


@dataclass(frozen=True)
class LentShare:
    """One layer's part in the values that are lent: the Gram matrix of its heads' features, kept heads first, `width`
    for each of their query heads and `wide` for those of the others, and one constant at the end where there is a bias;
    its products with the target; the target's square; W_O [places, group, width, d] and its bias to start from; how
    many heads keep a value; and how much the layer's error counts."""

    gram: Tensor
    cross: Tensor
    size: float
    output: Tensor
    bias: Tensor | None
    kept: int
    weight: float

    def into(self, lent: Tensor) -> BlockDiagonal:
        """From all columns to what W_O sees, with these values lent."""
        group, width = self.output.shape[1:3]
        constant = () if self.bias is None else (1,)
        return BlockDiagonal(self.kept * group * width, *lent.repeat_interleave(group, dim=0), *constant)


def fit_lent(shares: list[LentShare], start: Tensor, strength: float, sweeps: int) -> Tensor:
    """The lent W_V [lent, wide, width] from which W_O of every layer makes most of its target: both in turns.

    The values of the kept heads stay what they are. `start` is where the values begin, and are pulled to.
    """
    lent, (count, wide, width) = start.clone(), start.shape
    missed = torch.inf
    for _ in range(max(1, sweeps)):
        outputs, found = [], 0.0
        for share in shares:
            prior = share.output.flatten(0, 2)
            if share.bias is not None:
                prior = torch.cat((prior, share.bias[None]))
            into = share.into(lent)
            gram, cross = into.gram(share.gram), into.reduce(share.cross)
            outputs.append(ridge(gram, cross, prior, strength))
            found += share.weight * missed_square(share.size, gram, cross, outputs[-1])
        if missed - found < 1e-3 * found:
            break
        missed = found
        for i in range(count):
            terms, right = [], torch.zeros_like(start[i])
            others = lent.clone()
            others[i] = start[i]
            for share, flat in zip(shares, outputs, strict=True):
                group, own = share.output.shape[1], share.kept * share.output.shape[1] * width
                first = own + i * group * wide
                place = own + i * group * width
                parts = [flat[place + q * width : place + (q + 1) * width] for q in range(group)]
                left = left_over(share.gram, share.cross, share.into(others), flat, first, wide, parts)
                right += share.weight * left
                mine = slice(first, first + group * wide)
                terms.append((share.weight * share.gram[mine, mine], parts))
            lent[i] = start[i] + _value(terms, right, lent[i] - start[i], strength)
    return lent


def _value(terms: list[tuple[Tensor, list[Tensor]]], right: Tensor, start: Tensor, strength: float) -> Tensor:
    """`sum over terms and q, r of blocks_qr V O_r O_q^T = right`, damped: one query head of one layer by two solves,
    several by conjugate gradients from `start`.

    terms: per layer the Gram matrix [group * wide, group * wide] and W_O [width, d] of each query head.
    """
    if len(terms) == 1 and len(terms[0][1]) == 1:
        blocks, (output,) = terms[0]
        square = output @ output.T
        half = ridge(square, right.T, torch.zeros_like(right.T), strength).T
        return ridge(blocks, half, torch.zeros_like(half), strength)
    wide = len(start)
    factors = []
    scale = 0.0
    for blocks, outputs in terms:
        for q, one in enumerate(outputs):
            for r, other in enumerate(outputs):
                factors.append((blocks[q * wide : (q + 1) * wide, r * wide : (r + 1) * wide], other @ one.T))
        scale += float(blocks.diagonal().mean() * sum(o.square().sum() / len(o) for o in outputs) / len(outputs))

    if not scale:  # nothing is made of the value
        return start

    def apply(value: Tensor) -> Tensor:
        total = strength * scale * value
        for block, product in factors:
            total = total + block @ value @ product
        return total

    solve = _nearest_product(factors, strength * scale)
    value = start.clone()
    residual = right - apply(value)
    direction = solve(residual)
    norm = (residual * direction).sum()
    enough = 1e-14 * (right * solve(right)).sum()
    for _ in range(500):
        if norm <= enough:
            break
        applied = apply(direction)
        step = norm / (direction * applied).sum()
        value, residual = value + step * direction, residual - step * applied
        towards = solve(residual)
        following = (residual * towards).sum()
        direction, norm = towards + following / norm * direction, following
    return value


def _nearest_product(factors: list[tuple[Tensor, Tensor]], damping: float) -> Callable[[Tensor], Tensor]:
    """Solves `A V M + damping V = right`, where one A and one M stand for the sum over all factors: each the sum of its
    kind, weighted by the traces of the other."""
    traces = [(block.trace(), product.trace()) for block, product in factors]
    left = sum(m * block for (block, _), (_, m) in zip(factors, traces, strict=True))
    right = sum(a * product for (_, product), (a, _) in zip(factors, traces, strict=True))
    (stretch, left), (other, right) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    scales = stretch.clamp_min(0)[:, None] * other.clamp_min(0) / sum(a * m for a, m in traces) + damping
    return lambda residual: left @ (left.T @ residual @ right / scales) @ right.T
