"""How each base is trained, after the papers, and what its mechanisms change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import LeanError
from ..ranges import check_fields, check_options
from .catalog import BASES, MECHANISMS
from .names import parse_name

OPTIMIZERS = ("adamw", "muon")
LENGTHS = ("steps", "warmup_steps", "schedule_steps")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Counts are optimizer steps and whole batches of sequences, over all processes.

    Raises:
        LeanError: a number outside of its range, a minimum learning rate above the peak, or a warm-up that is longer
            than the cosine.
    """

    steps: int
    batch_size: int
    learning_rate: float
    min_learning_rate: float
    weight_decay: float
    warmup_steps: int
    schedule_steps: int | None = None  # length of the cosine, then the minimum; None: `steps`
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float | None = 1.0
    optimizer: str = OPTIMIZERS[0]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.optimizer not in OPTIMIZERS:
            raise LeanError(f"`optimizer` must be {' or '.join(OPTIMIZERS)}, found {self.optimizer!r}")
        if self.min_learning_rate > self.learning_rate:
            raise LeanError(
                f"the minimum learning rate ({self.min_learning_rate:g}) is above the peak ({self.learning_rate:g}); "
                "change one of them"
            )
        length = self.schedule_steps or self.steps
        # Behind a schedule that is all warm-up the rate would stay at its peak.
        if self.warmup_steps > length - (length < self.steps):
            found = f"a warm-up of {self.warmup_steps:,} steps is not shorter than the schedule of {length:,}"
            raise LeanError(f"{found}; give fewer `warmup_steps`")


# (base, mechanisms) -> recipe fields: each model's best learning rate in the sweep of results/quickstart, where it is
# not the base's; of the identity query at the weight decay of P1's first version.
TUNED: dict[tuple[str, frozenset[str]], dict[str, Any]] = {
    ("tiny", frozenset({"identity-query"})): {"learning_rate": 4e-3, "min_learning_rate": 4e-4},
    ("tiny", frozenset({"skipv1"})): {"learning_rate": 3e-3, "min_learning_rate": 3e-4},
    ("tiny", frozenset({"skipv1", "nonlinear-query"})): {"learning_rate": 4e-3, "min_learning_rate": 4e-4},
}


def recipe(name: str, **overrides: Any) -> Recipe:
    """Return how the papers train `name`: the base's recipe, changed as its mechanisms ask for, then overridden.

    For `tiny` the learning rates come from a committed sweep (`results/quickstart`), see `TUNED`. A different number of
    `steps` scales warm-up and cosine, and another `learning_rate` the minimum, unless these are given too.

    Raises:
        LeanError: unknown names, or numbers that `Recipe` refuses.
    """
    check_options(overrides)  # before others are scaled by it
    parsed = parse_name(name)
    own = Recipe(**BASES[parsed.base].recipe)
    mechanisms = [mechanism for mechanism, _ in parsed.mechanisms]
    for mechanism in mechanisms:
        data = MECHANISMS[mechanism]
        by_base = data.recipes[parsed.recipes[mechanism]] if mechanism in parsed.recipes else data.recipe
        own = replace(own, **by_base.get(parsed.base, {}))
    own = replace(own, **TUNED.get((parsed.base, frozenset(mechanisms)), {}))
    scaled = shortened(vars(own), own.steps, overrides.get("steps", own.steps))
    if "learning_rate" in overrides:
        scaled["min_learning_rate"] = overrides["learning_rate"] * (own.min_learning_rate / own.learning_rate)
    return replace(own, **{**scaled, **overrides})


def shortened(fields: Mapping[str, Any], planned: int, steps: int) -> dict[str, Any]:
    """Return fields of a recipe of `planned` steps with other `steps`: warm-up and cosine scale along."""
    scaled = {name: round(fields[name] * steps / planned) for name in LENGTHS[1:] if fields.get(name) is not None}
    return {**fields, **scaled, "steps": steps}


def recipe_differences(groups: Iterable[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return in what recipes of one group differ beside the learning rate's peak: `the weight decay (0.03125, 0.1)`."""
    phrases: dict[str, None] = {}
    for recipes in groups:
        told = {
            "weight decay": _different(one["weight_decay"] for one in recipes),
            "share of its peak that the learning rate falls to": _different(
                one["min_learning_rate"] / one["learning_rate"] for one in recipes
            ),
            "steps of warm-up": _different(one["warmup_steps"] for one in recipes),
            "optimizer": sorted({one.get("optimizer", OPTIMIZERS[0]) for one in recipes}),
        }
        phrases |= {f"the {name} ({', '.join(found)})": None for name, found in told.items() if len(found) > 1}
    return list(phrases)


def _different(numbers: Iterable[float]) -> list[str]:
    return sorted({f"{number:.4g}" for number in numbers}, key=float)
