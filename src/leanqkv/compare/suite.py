"""Comparisons to run: entries in groups, their recipes and data; and the suites, which are comparisons by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets import preset
from ..presets.recipes import LENGTHS, Recipe, recipe, recipe_differences, shortened
from ..ranges import POSITIVE, SEED, check_each
from ..train.spec import RunSettings

TINY, SMALL, PAPER = SCALES = ("tiny", "small", "paper")


@dataclass(frozen=True)
class Entry:
    """One line of a comparison.

    Attributes:
        model: BASE+MECHANISM:option=value+field=value.
        label: its name in tables and directories, unique in its comparison; by default the model's name.
        recipe: recipe fields that differ from the model's own.
        row: the line of the paper's table or figure that it stands for.
        uptrain: it starts from its group's baseline of the same seed, converted by `skipv1` and `method=mean-v` (P3
            section 5.1), and is trained for this share of the steps, without dropout. None: from random weights.
    """

    model: str
    label: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    uptrain: float | None = None

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.model)

    def full_recipe(self, overrides: Mapping[str, Any]) -> Recipe:
        """Return the model's own recipe, changed as the entry says, then by `overrides`, then shortened by `uptrain`.

        Other steps than the entry's scale its warm-up and the length of its cosine along.
        """
        own = dict(self.recipe)
        if "steps" in overrides:
            own = shortened(own, own.get("steps", recipe(self.model).steps), overrides["steps"])
        whole = recipe(self.model, **{**own, **overrides})
        if self.uptrain is None:
            return whole
        return Recipe(**shortened(vars(whole), whole.steps, max(1, round(self.uptrain * whole.steps))))


# The first entry of a group is the baseline of the others.
Group = tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison(RunSettings):
    """A comparison to run: the entries of each group against its first, on the same batches and seeds.

    Attributes:
        recipe: recipe fields for every entry, in place of its own.
        learning_rates: the grid to search for each entry by itself, on a seed of its own; None: the recipes' rates.
        grid_steps: of each run of that search; None: as many as of the others.
        suite, scale: of a suite, its name and scale.
        base: what the models of a suite are built on in place of its own base.
        notes: for the report, the choices that are ours.
        data, tokenizer: names of a data set and its tokenizer; None: the default corpus, a tokenizer trained on it.
        tasks: of lm-eval, on which every trained model is scored; sets of them too.
        limit: of the examples of each task.
        command: the command line that it was asked for with.

    Raises:
        LeanError: two entries of one label, a number outside of its range, or a recipe for all where the entries differ
            in just that.
    """

    title: str
    groups: tuple[Group, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] | None = None
    grid_steps: int | None = None
    suite: str | None = None
    scale: str | None = None
    base: str | None = None
    notes: tuple[str, ...] = ()
    data: str | None = None
    tokenizer: str | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    command: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("a seed", self.seeds, SEED)
        check_each("a learning rate", self.learning_rates or (), POSITIVE)
        entries = [entry for group in self.groups for entry in group]
        labels = [entry.label for entry in entries]
        if repeated := {label for label in labels if labels.count(label) > 1}:
            raise LeanError(f"{repeated.pop()} is named twice")
        if self.learning_rates and any(entry.uptrain for entry in entries):
            raise LeanError("`lr_grid` does not search the rate of uptrained models; leave it out")
        for name in {*self.recipe, *(("learning_rate",) if self.learning_rates else ())} - set(LENGTHS):
            if len({entry.recipe.get(name) for entry in entries}) > 1:
                raise LeanError(f"the models of this comparison differ in {name.replace('_', ' ')}; leave it to them")

    @property
    def entries(self) -> dict[str, Entry]:
        """By label, the first baseline first."""
        return {entry.label: entry for group in self.groups for entry in group}

    @cached_property
    def configs(self) -> dict[str, LeanConfig]:
        """By label."""
        return {label: preset(entry.model) for label, entry in self.entries.items()}

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """By label."""
        return {label: entry.full_recipe(self.recipe) for label, entry in self.entries.items()}

    @property
    def recipe_differences(self) -> list[str]:
        """In what the recipes of a group's entries differ beside the peak of the learning rate."""
        asked = dict(self.recipe)
        if self.learning_rates:  # all are tried with the same
            asked["learning_rate"] = self.learning_rates[0]
        groups = [[entry for entry in group if entry.uptrain is None] for group in self.groups]
        return recipe_differences([vars(entry.full_recipe(asked)) for entry in group] for group in groups)

    @property
    def runs(self) -> int:
        """How many runs it reports."""
        return len(self.entries) * len(self.seeds)

    @property
    def grid_seed(self) -> int:
        """A seed that no reported run uses: the rates are not chosen on the runs they are reported for."""
        return max(self.seeds) + 1


@dataclass(frozen=True)
class Published:
    """The numbers of a paper's table or figure, row by row.

    Attributes:
        source: paper and table or figure.
        setting: size, data and length of training that it was measured at.
        metric: a name in `report.papers.METRICS`.
        groups: row -> printed text; the first row of a group is the baseline of the others. Where a figure has no
            numbers, words say what its text says.
    """

    source: str
    setting: str
    metric: str
    groups: tuple[Mapping[str, str], ...]

    @property
    def printed(self) -> dict[str, str]:
        """The printed text, by row."""
        return {row: text for group in self.groups for row, text in group.items()}

    @property
    def baselines(self) -> dict[str, str]:
        """The baseline's row, by row."""
        return {row: next(iter(group)) for group in self.groups for row in group}


@dataclass(frozen=True)
class Suite:
    """A comparison with a name, at every scale it exists at.

    Attributes:
        source: the tables and figures it is about.
        claims: statements of the papers that have no number in a table, each with its place.
        stability: whether the question is which runs diverge; the report then lists every run's outcome.
    """

    title: str
    source: str
    scales: Mapping[str, Comparison]
    published: tuple[Published, ...] = ()
    claims: tuple[str, ...] = ()
    stability: bool = False
