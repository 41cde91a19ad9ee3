"""Which tokens are predicted, as loops: BERT's masks and prefixes, from the numbers that were drawn."""

import numpy as np

Row = list[int]


def masked(ids: Row, order: Row, action: Row, token: Row, mask: int, special: set[int]) -> tuple[Row, Row]:
    """Devlin et al. 2018, section 3.1: 15% of the positions, first come first served; "the i-th token is replaced with
    (1) the [MASK] token 80% of the time (2) a random token 10% of the time (3) the unchanged i-th token 10%"."""
    waiting = [position for position, one in enumerate(ids) if one not in special]
    number = max(1, round(0.15 * len(waiting))) if waiting else 0
    seen, labels = list(ids), [-100] * len(ids)
    for _ in range(number):
        position = min(waiting, key=lambda one: order[one])
        waiting.remove(position)
        labels[position] = ids[position]
        if action[position] < 0.8:
            seen[position] = mask
        elif action[position] < 0.8 + 0.1:
            seen[position] = token[position]
    return seen, labels


def after_prefix(tokens: Row, prefix: int) -> tuple[Row, Row, Row]:
    """Inputs, the target behind each, and which inputs are the prefix: the first `prefix` tokens are given, the others
    predicted."""
    inputs, targets, given = [], [], []
    for position in range(len(tokens) - 1):
        inputs.append(tokens[position])
        given.append(int(position < prefix))
        targets.append(tokens[position + 1] if position + 1 >= prefix else -100)
    return inputs, targets, given


def rows(array: np.ndarray) -> list[Row]:
    return np.asarray(array).tolist()
