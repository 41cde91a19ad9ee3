"""What decides the numbers of a run."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..presets import Recipe


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the numbers of a run; two runs of equal specs on one machine give equal losses.

    Of images, `context_length` is how many tokens the model makes of one, and `evaluation_sequences` how many of the
    test split are evaluated.
    """

    name: str
    config: dict[str, Any]
    recipe: Recipe
    seed: int
    context_length: int
    precision: str
    data_sha256: str
    precision_timings: dict[str, float] = field(default_factory=dict)
    micro_batch_size: int | None = None
    evaluation_sequences: int = 128
    evaluate_every: int = 50
    log_every: int = 10
    gradient_checkpointing: bool = False
    role: str = "final"
    initial_sha256: str | None = None  # of the weights it starts from; None: drawn from the seed
    teacher_sha256: str | None = None  # of a model whose predictions it is to match as well
    distillation: float = 0.0  # weight of the divergence from the teacher, 1 less this that of the loss

    @property
    def log_interval(self) -> int:
        """Steps between entries of the log: `log_every`, or less, so that a checkpoint never falls between two. The
        trainer forgets the losses since the last entry when it goes on from a checkpoint."""
        return math.gcd(self.log_every, self.evaluate_every)

    def tokens(self, steps: int) -> int:
        """Of so many steps."""
        return steps * self.recipe.batch_size * self.context_length

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))
