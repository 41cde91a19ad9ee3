"""The least-squares problem of one attention's output: W_V of the kept heads and W_O of all, from Gram matrices."""

import torch
from torch import Tensor


class System:
    """Minimises `|T - sum_h,q P_hq X V_h O_hq - sum_p,q P_pq V1_p O_pq - 1 b|^2` over V of the kept heads, all O, b.

    Columns of the Gram matrix: for every place and each of its `group` query heads, `wide` for a kept head, `width` for
    another; one constant at the end where there is a bias.
    """

    def __init__(self, gram: Tensor, cross: Tensor, size: float, kept: int, places: int, group: int, ridge: float):
        self.gram, self.cross, self.size = gram, cross, size
        self.kept, self.places, self.group, self.ridge = kept, places, group, ridge

    def solve(
        self, value: Tensor, output: Tensor, biased: bool, sweeps: int
    ) -> tuple[Tensor, Tensor, Tensor | None, float]:
        """value: [kept, wide, width], where to start; output: [places, group, width, d], for its shape.

        Returns value, output, the bias [d] or None, and the share of the target that is missed.
        """
        missed = torch.inf
        for sweep in range(max(1, sweeps)):
            into = self._into(value, output.shape[2], biased)
            flat = self._output(into)
            found = self._missed(into @ flat)
            if sweep + 1 >= sweeps or missed - found < 1e-4 * found:
                break
            missed = found
            value = self._values(value, into, flat)
        count = self.places * self.group * output.shape[2]
        return value, flat[:count].view_as(output), flat[count] if biased else None, found

    def _into(self, value: Tensor, width: int, biased: bool) -> Tensor:
        """From all columns to what W_O sees: V for the kept heads, the identity for the others."""
        kept = [value[place] for place in range(self.kept) for _ in range(self.group)]
        others = (self.places - self.kept) * self.group * width + biased
        return torch.block_diag(*kept, torch.eye(others, dtype=torch.float64))

    def _output(self, into: Tensor) -> Tensor:
        return _ridge(into.T @ self.gram @ into, into.T @ self.cross, self.ridge)

    def _missed(self, coefficients: Tensor) -> float:
        error = self.size - 2 * (coefficients * self.cross).sum() + (coefficients * (self.gram @ coefficients)).sum()
        return float(error) / self.size

    def _values(self, value: Tensor, into: Tensor, flat: Tensor) -> Tensor:
        """One head after another, each exactly: V solves `sum_q,r A_qr V O_r O_q^T = sum_q B_q O_q^T`."""
        wide, width = value.shape[1:]
        value = value.clone()
        coefficients = into @ flat
        for place in range(self.kept):
            rows = [slice(i * wide, (i + 1) * wide) for i in range(place * self.group, (place + 1) * self.group)]
            outputs = [flat[i * width : (i + 1) * width] for i in range(place * self.group, (place + 1) * self.group)]
            mine = slice(rows[0].start, rows[-1].stop)
            coefficients[mine] = 0
            residual = self.cross[mine] - self.gram[mine] @ coefficients
            parts = [residual[i * wide : (i + 1) * wide] @ out.T for i, out in enumerate(outputs)]
            blocks = self.gram[mine, mine]
            value[place] = _value(blocks, outputs, torch.stack(parts).sum(0), value[place], self.ridge)
            coefficients[mine] = torch.cat([value[place] @ out for out in outputs])
        return value


def _value(blocks: Tensor, outputs: list[Tensor], right: Tensor, start: Tensor, ridge: float) -> Tensor:
    """`blocks V (O O^T) = right` for one query head by two solves; for several by conjugate gradients from `start`."""
    group = len(outputs)
    if group == 1:
        square = outputs[0] @ outputs[0].T
        return _ridge(blocks, _ridge(square, right.T, ridge).T, ridge)
    wide = len(start)
    products = [[a @ b.T for b in outputs] for a in outputs]
    damping = ridge * blocks.diagonal().mean() * sum(products[i][i].diagonal().mean() for i in range(group)) / group

    def apply(value: Tensor) -> Tensor:
        total = damping * value
        for q in range(group):
            for r in range(group):
                total = total + blocks[q * wide : (q + 1) * wide, r * wide : (r + 1) * wide] @ value @ products[r][q]
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


def _ridge(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    return torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64), cross)
