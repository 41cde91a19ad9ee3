"""What a suite is made of: entries, what a paper prints for them, and the setup at each scale."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import LeanError
from ..presets import Recipe, recipe

TINY, SMALL, PAPER = SCALES = ("tiny", "small", "paper")
LENGTHS = ("steps", "warmup_steps", "schedule_steps")


@dataclass(frozen=True)
class Entry:
    """One line of a comparison.

    Attributes:
        model: BASE+MECHANISM:option=value+field=value.
        label: how tables and directories call it, unique in its comparison; by default the model's name.
        recipe: where its recipe departs from the model's own.
        row: the line of the paper's table or figure that it stands for.
    """

    model: str
    label: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.model)

    def full_recipe(self, asked: Mapping[str, Any]) -> Recipe:
        """The model's own recipe, changed as the entry says, then as a person asked for.

        Other steps than the entry's scale its warm-up and the length of its cosine along.
        """
        own = dict(self.recipe)
        if "steps" in asked:
            planned = own.get("steps", recipe(self.model).steps)
            for name in ("warmup_steps", "schedule_steps"):
                if name in own:
                    own[name] = round(own[name] * asked["steps"] / planned)
        return recipe(self.model, **{**own, **asked})


# The first entry of a group is the one that the others are compared with.
Group = tuple[Entry, ...]


def check_groups(groups: tuple[Group, ...], asked: Collection[str]) -> None:
    """Raises:
    LeanError: two entries of one name, or a value asked for all where the entries differ in just that.
    """
    entries = [entry for group in groups for entry in group]
    labels = [entry.label for entry in entries]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise LeanError(f"{repeated.pop()} is named twice")
    for name in set(asked) - set(LENGTHS):
        if len({entry.recipe.get(name) for entry in entries}) > 1:
            raise LeanError(f"the models of this comparison differ in {name.replace('_', ' ')}; leave it to them")


@dataclass(frozen=True)
class Published:
    """What one table or figure prints, row by row.

    Attributes:
        source: paper and table or figure.
        setting: size, data and length of training that it was measured at.
        metric: a name in `published.METRICS`.
        groups: row -> what is printed; the first row of a group is the one that the others are compared with. Where a
            figure has no numbers, words say what its text says.
    """

    source: str
    setting: str
    metric: str
    groups: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Setup:
    """A suite at one scale. `notes` say what in it is ours.

    Attributes:
        data, tokenizer: names of a data set and its tokenizer; None: the default corpus, a tokenizer trained on it.
    """

    groups: tuple[Group, ...]
    seeds: int = 3
    data: str | None = None
    tokenizer: str | None = None
    evaluation_sequences: int = 256
    evaluate_every: int = 100
    notes: tuple[str, ...] = ()

    @property
    def entries(self) -> list[Entry]:
        return [entry for group in self.groups for entry in group]

    @property
    def runs(self) -> int:
        return len(self.entries) * self.seeds


@dataclass(frozen=True)
class Suite:
    """A comparison with a name, at every scale it exists at.

    Attributes:
        source: the tables and figures it is about.
        claims: what the papers say of it in words alone, each with its place.
        stability: whether the question is which runs diverge; the report then lists every run's outcome.
    """

    title: str
    scales: Mapping[str, Setup]
    source: str = "ours"
    published: tuple[Published, ...] = ()
    claims: tuple[str, ...] = ()
    stability: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """The labels at the smallest scale."""
        return tuple(entry.label for entry in next(iter(self.scales.values())).entries)
