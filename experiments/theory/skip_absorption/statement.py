"""When a ReLU MLP with a skip connection is a ReLU MLP of the same width without one.

Karbevski & Mijoski 2025, appendix E, Theorem E.1 and Corollary E.2. https://arxiv.org/abs/2510.23912

Columns: W_1 [m, h], W_2 [h, m], x [h]. With W_1 of pairwise non-collinear non-zero rows, W_2 of non-zero columns and
both of rank h >= 2, there are V_1, V_2 of the same shapes with `W_2 ReLU(W_1 x) + x = V_2 ReLU(V_1 x)` for all x if and
only if an index set J has `W_2[:, J] W_1[J, :] = -I`. Then V_2 = W_2 will do, and for V_1
W_1 with the rows in J negated, since `ReLU(-y) = ReLU(y) - y`. All in the dtype given: float64, or int64 where every
step is exact.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from leanqkv.errors import LeanError

Array = NDArray[Any]
LARGEST = 20  # 2^m index sets are tried
CHUNK = 1 << 14


def mlp(w1: Array, w2: Array, x: Array, skip: Array | None = None) -> Array:
    """Return `W_2 ReLU(W_1 x) + Z x` for the columns of x [h, n] -> [h, n]; no skip where Z [h, h] is None."""
    output = w2 @ np.maximum(w1 @ x, 0)
    return output if skip is None else output + skip @ x


def absorb(w1: Array, w2: Array, chosen: Array) -> tuple[Array, Array]:
    """Return V_1 and V_2 for the index set `chosen`, booleans [m]: the rows of W_1 in it negated, W_2 as it is.

    `V_2 ReLU(V_1 x) = W_2 ReLU(W_1 x) - W_2[:, J] W_1[J, :] x` for whatever J.
    """
    return np.where(chosen[:, None], -w1, w1), w2


def absorbable_weights(h: int, m: int, size: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return random float64 W_1, W_2, and one J of `size` >= h indices, as booleans, with `W_2[:, J] W_1[J, :] = -I`.

    The columns of W_2 in J are `-W_1[J, :]^+` plus something random that W_1[J, :] does not see; the rest is random.
    """
    w1, w2 = rng.standard_normal((m, h)), rng.standard_normal((h, m))
    chosen = np.zeros(m, dtype=bool)
    chosen[rng.permutation(m)[:size]] = True
    inverse = np.linalg.pinv(w1[chosen])
    unseen = np.eye(size) - w1[chosen] @ inverse
    w2[:, chosen] = -inverse + w2[:, chosen] @ unseen
    return w1, w2, chosen


def absorbable_integers(h: int, m: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return the same in int64 with |J| = h.

    The rows of W_1 in J are a random product of elementary matrices, whose inverse is of integers too. The rows outside
    J are drawn until no two of W_1 are collinear.
    """
    while True:
        rows, inverse = np.eye(h, dtype=np.int64), np.eye(h, dtype=np.int64)
        for _ in range(2 * h):
            i, j = rng.permutation(h)[:2]
            step = np.eye(h, dtype=np.int64)
            step[i, j] = rng.choice((-1, 1))
            rows, inverse = step @ rows, inverse @ (2 * np.eye(h, dtype=np.int64) - step)
        w1, w2 = rng.integers(-5, 6, (m, h)), rng.integers(-5, 6, (h, m))
        chosen = np.zeros(m, dtype=bool)
        chosen[rng.permutation(m)[:h]] = True
        w1[chosen], w2[:, chosen] = rows, -inverse
        if unmet_hypothesis(w1, w2) is None:
            return w1, w2, chosen


def unmet_hypothesis(w1: Array, w2: Array) -> str | None:
    """Return which of the theorem's hypotheses the weights do not meet, or None."""
    h = w1.shape[1]
    if h < 2:
        return f"the width is {h}, at least 2 is needed"
    if not (w2 != 0).any(0).all():
        return "a column of W_2 is zero"
    if not (w1 != 0).any(1).all():
        return "a row of W_1 is zero"
    if min(np.linalg.matrix_rank(w1), np.linalg.matrix_rank(w2)) < h:
        return f"W_1 or W_2 has a rank below {h}"
    directions = w1 / np.linalg.norm(w1, axis=1, keepdims=True)
    cosines = np.abs(directions @ directions.T)
    np.fill_diagonal(cosines, 0)
    return "two rows of W_1 are collinear" if cosines.max() > 1 - 1e-12 else None


def nearest_index_set(w1: Array, w2: Array, target: Array) -> tuple[Array, float]:
    """Return the J, as booleans [m], whose `W_2[:, J] W_1[J, :]` is nearest to `target` [h, h], and the distance.

    Every J is tried. The Frobenius distance is zero, up to rounding, if and only if a J reaches the target.

    Raises:
        LeanError: the hypotheses of the theorem are not met, or m is more than can be tried.
    """
    m = w1.shape[0]
    if (unmet := unmet_hypothesis(w1, w2)) is not None:
        raise LeanError(f"Theorem E.1 does not apply: {unmet}")
    if m > LARGEST:
        raise LeanError(f"{m} hidden units have 2^{m} index sets; at most {LARGEST} units can be decided")
    products = np.einsum("im,mj->mij", w2, w1).reshape(m, -1)
    best, least = np.zeros(m, dtype=bool), np.inf
    for start in range(0, 1 << m, CHUNK):
        codes = np.arange(start, min(start + CHUNK, 1 << m))
        chosen = (codes[:, None] >> np.arange(m)) & 1
        distances = np.linalg.norm(chosen @ products - target.reshape(-1), axis=1)
        at = int(distances.argmin())
        if distances[at] < least:
            best, least = chosen[at].astype(bool), float(distances[at])
    return best, least


def moved_skip(w1: Array, w2: Array, skip: Array, chosen: Array) -> tuple[Array, Array]:
    """Return Z' and W_1' of the counterexample to Corollary E.2 as it is quantified.

    `Z' = Z + W_2[:, J] W_1[J, :]` and `W_1'` with the rows in J negated give the same function as (W_1, W_2, Z),
    whatever these are.
    """
    return skip + w2[:, chosen] @ w1[chosen], absorb(w1, w2, chosen)[0]
