"""What the tests of the statements share: a check at small size, and which of its findings fail."""

from dataclasses import replace

import torch

from experiments.theory.basis_transfer.statement import Recipe
from experiments.theory.check import load_check

FLOAT = torch.float64
# Small enough that a check takes a second or two; each passes as it is.
SMALL = {
    "initial-spread": {"widths": (192,), "batch": 1, "length": 64},
    "layer-norm": {"widths": (8, 16), "defect_widths": (32, 128)},
    "basis-transfer": {
        "readings": ("both by √(4d)",),
        "recipe": Recipe(
            steps=700, batch_size=128, warmup_steps=20, learning_rate=1e-2, evaluation=1000, ridge_samples=10_000
        ),
    },
    "skip-absorption": {"draws": 3},
    "hadamard": {"cases": 20},
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def failures(name: str, **settings) -> str:
    """The findings that fail, one per line."""
    check = load_check(name)
    settings = {**SMALL[name], **settings}
    record = check.run(replace(check.settings.quick(), **settings), lambda part, done, total: None)
    failed = [finding["what"] for finding in record["outcome"]["findings"] if not finding["passed"]]
    assert record["outcome"]["passed"] == (not failed)
    return "\n".join(failed)
