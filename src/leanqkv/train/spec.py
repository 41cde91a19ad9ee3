"""The specification of a run: everything that decides its numbers."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..data.batches import DEFAULT_EVALUATION
from ..errors import LeanError
from ..presets.recipes import OPTIMIZERS, Recipe
from ..ranges import check_fields

# How run.json and record.json begin, whichever class a field is inherited from.
_FIRST_FIELDS = (
    *("name", "config", "recipe", "seed", "context_length", "precision", "data_sha256", "precision_timings"),
    *("micro_batch_size", "evaluation_sequences", "evaluate_every"),
)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that all runs of a comparison share.

    Attributes:
        context_length: tokens per sequence; of images, how many tokens the model makes of one. None: all positions.
        micro_batch_size: sequences or images that a process takes at a time; the rest of a batch is accumulated. None:
            the whole batch, or a process's part of it.
        evaluation_sequences: how many sequences of the validation text, or images of the test split, are evaluated.
        evaluate_every: steps between evaluations, which are checkpoints too.
        shard: "fsdp": weights, gradients and optimizer state are split over the processes; None: each has all.

    Raises:
        LeanError: a number outside of its range.
    """

    context_length: int | None = None
    micro_batch_size: int | None = None
    evaluation_sequences: int = DEFAULT_EVALUATION
    evaluate_every: int = 50
    shard: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunSettings):
    """Everything that decides the numbers of a run; two runs of equal specs on one machine give equal losses.

    Attributes:
        initial_sha256: of the weights that the run starts from; None: they are drawn from the seed.
        teacher_sha256, teacher_config: of a model whose predictions are to be matched as well.
        distillation: weight of the divergence from the teacher; the loss weighs 1 less this.
        distillation_temperature: what both models' logits are divided by for the divergence.
        only_changed: train only the parameters that differ from the teacher's.
        norm_schedule: after which steps which norms of the model are removed; None: all stay (norm_removal.py).
    """

    name: str
    config: dict[str, Any]
    recipe: Recipe
    seed: int
    context_length: int
    precision: str
    data_sha256: str
    precision_timings: dict[str, float] = field(default_factory=dict)
    log_every: int = 10
    gradient_checkpointing: bool = False
    role: str = "final"
    initial_sha256: str | None = None
    teacher_sha256: str | None = None
    teacher_config: dict[str, Any] | None = None
    distillation: float = 0.0
    distillation_temperature: float = 1.0
    only_changed: bool = False
    norm_schedule: list[tuple[int, str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe.optimizer == "muon" and (self.shard or self.config.get("mlp_type") == "moe"):
            raise LeanError("`optimizer=muon` is for whole matrices: not with `shard`, nor experts (mlp_type=moe)")

    @property
    def log_interval(self) -> int:
        """Steps between entries of the log: `log_every`, or less, so that a checkpoint never falls between two.

        The trainer forgets the losses since the last entry when it goes on from a checkpoint.
        """
        return math.gcd(self.log_every, self.evaluate_every)

    def tokens(self, steps: int) -> int:
        """Return how many tokens `steps` optimizer steps train on."""
        return steps * self.recipe.batch_size * self.context_length

    def as_json(self) -> dict[str, Any]:
        """Return the content of run.json, with which record.json begins too."""
        content = asdict(self)
        if self.recipe.optimizer == OPTIMIZERS[0]:
            del content["recipe"]["optimizer"]  # as in records from before there was another
        return json.loads(json.dumps({name: content[name] for name in dict.fromkeys((*_FIRST_FIELDS, *content))}))
