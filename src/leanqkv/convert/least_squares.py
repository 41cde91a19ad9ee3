"""Least squares from Gram matrices: W_V of the kept heads and W_O of all in a layer, and the values that are lent."""

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
            into = self._into(value, output.shape[2], bias is not None)
            flat = ridge(into.T @ self.gram @ into, into.T @ self.cross, start, self.strength)
            found = self._missed(into @ flat)
            if sweep + 1 >= sweeps or missed - found < 1e-4 * found:
                break
            missed = found
            value = self._values(value, first, into, flat)
        count = self.places * self.group * output.shape[2]
        return value, flat[:count].view_as(output), None if bias is None else flat[count], found

    def _into(self, value: Tensor, width: int, biased: bool) -> Tensor:
        """From all columns to what W_O sees: V for the kept heads, the identity for the others."""
        kept = [value[place] for place in range(self.kept) for _ in range(self.group)]
        others = (self.places - self.kept) * self.group * width + biased
        return torch.block_diag(*kept, torch.eye(others, dtype=torch.float64))

    def _missed(self, coefficients: Tensor) -> float:
        error = self.size - 2 * (coefficients * self.cross).sum() + (coefficients * (self.gram @ coefficients)).sum()
        return float(error) / self.size

    def _values(self, value: Tensor, first: Tensor, into: Tensor, flat: Tensor) -> Tensor:
        """One head after another, each exactly: V solves `sum_q,r A_qr V O_r O_q^T = sum_q B_q O_q^T`."""
        wide, width = value.shape[1:]
        value = value.clone()
        coefficients = into @ flat
        for place in range(self.kept):
            rows = [slice(i * wide, (i + 1) * wide) for i in range(place * self.group, (place + 1) * self.group)]
            outputs = [flat[i * width : (i + 1) * width] for i in range(place * self.group, (place + 1) * self.group)]
            mine = slice(rows[0].start, rows[-1].stop)
            # What is left for this head beyond the value it started with: the step away from that is pulled to zero.
            coefficients[mine] = torch.cat([first[place] @ out for out in outputs])
            residual = self.cross[mine] - self.gram[mine] @ coefficients
            parts = [residual[i * wide : (i + 1) * wide] @ out.T for i, out in enumerate(outputs)]
            terms = [(self.gram[mine, mine], outputs)]
            step = _value(terms, torch.stack(parts).sum(0), value[place] - first[place], self.strength)
            value[place] = first[place] + step
            coefficients[mine] = torch.cat([value[place] @ out for out in outputs])
        return value


def ridge(gram: Tensor, cross: Tensor, start: Tensor, strength: float) -> Tensor:
    """The W that minimises `|T - X W|^2 + damping |W - start|^2` from `gram = X^T X` and `cross = X^T T`; damping is
    `strength` times the mean of the Gram matrix's diagonal."""
    damping = strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
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


def fit_lent(shares: list[LentShare], start: Tensor, strength: float, sweeps: int) -> Tensor:
    """The lent W_V [lent, wide, width] from which W_O of every layer makes most of its target: both in turns.

    The values of the kept heads stay what they are. `start` is where the values begin, and are pulled to.
    """
    lent, (count, wide, width) = start.clone(), start.shape
    missed = torch.inf
    for _ in range(max(1, sweeps)):
        outputs, found = [], 0.0
        for share in shares:
            group = share.output.shape[1]
            own = torch.eye(share.kept * group * width, dtype=start.dtype)
            into = torch.block_diag(own, *(lent[i] for i in range(count) for _ in range(group)))
            prior = share.output.flatten(0, 2)
            if share.bias is not None:
                into = torch.block_diag(into, torch.ones(1, 1, dtype=start.dtype))
                prior = torch.cat((prior, share.bias[None]))
            joined = share.gram @ into
            flat = ridge(into.T @ joined, into.T @ share.cross, prior, strength)
            error = share.size - 2 * (flat * (into.T @ share.cross)).sum() + (flat * (into.T @ joined @ flat)).sum()
            found += share.weight * float(error)
            outputs.append((flat, into @ flat))
        if missed - found < 1e-3 * found:
            break
        missed = found
        for i in range(count):
            terms, right = [], torch.zeros_like(start[i])
            for share, (flat, coefficients) in zip(shares, outputs, strict=True):
                group = share.output.shape[1]
                before = share.kept * group * width
                rows = [before + (i * group + q) * wide for q in range(group)]
                place = (share.kept + i) * group * width
                mine = slice(rows[0], rows[-1] + wide)
                parts = [flat[place + q * width : place + (q + 1) * width] for q in range(group)]
                coefficients[mine] = torch.cat([start[i] @ part for part in parts])
                residual = share.weight * (share.cross[mine] - share.gram[mine] @ coefficients)
                right += sum(residual[q * wide : (q + 1) * wide] @ part.T for q, part in enumerate(parts))
                terms.append((share.weight * share.gram[mine, mine], parts))
            lent[i] = start[i] + _value(terms, right, lent[i] - start[i], strength)
            for share, (flat, coefficients) in zip(shares, outputs, strict=True):
                group = share.output.shape[1]
                for q in range(group):
                    row = share.kept * group * width + (i * group + q) * wide
                    place = ((share.kept + i) * group + q) * width
                    coefficients[row : row + wide] = lent[i] @ flat[place : place + width]
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

    def apply(value: Tensor) -> Tensor:
        total = strength * scale * value
        for block, product in factors:
            total = total + block @ value @ product
        return total

    value = start.clone()
    residual = right - apply(value)
    direction, norm = residual.clone(), residual.square().sum()
    first = norm
    for _ in range(200):
        if norm <= 1e-16 * first:
            break
        applied = apply(direction)
        step = norm / (direction * applied).sum()
        value, residual = value + step * direction, residual - step * applied
        following = residual.square().sum()
        direction, norm = residual + following / norm * direction, following
    return value
