"""The measures of an analysis that its tables and figures show."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Record = Mapping[str, Any]
Model = Mapping[str, Any]  # one model's part of the record; or, of logits and conditions, a stage of its training

SCORES = {"previous_token": "previous-token", "induction": "induction", "matching": "matching"}  # of heads


@dataclass(frozen=True)
class Measure:
    """Something that every layer of a model has a value of; None where a layer has none."""

    name: str
    title: str
    unit: str
    digits: int
    of: Callable[[Model], Sequence[float | None]]

    def mean(self, model: Model) -> float | None:
        """Return the mean over the layers that have a value; None where none has."""
        known = [value for value in self.of(model) if value is not None]
        return fmean(known) if known else None


def _similarity(name: str, title: str) -> Measure:
    return Measure(name, title, "cosine", 3, lambda model: [layer["mean"] for layer in model["similarity"][name]])


PROBE = Measure("probe", "Loss of the linear probe", "validation loss", 3, lambda m: m["probe"]["losses"])
SPREAD = Measure("spread", "Spread of the attention logits", "standard deviation", 3, lambda m: m["logit_spread"])
HEADS = _similarity("heads", "Similarity of two heads' outputs before W_O")
CONTRIBUTIONS = _similarity("contributions", "Similarity of what two heads add to the output, after W_O")
TOKENS = _similarity("tokens", "Similarity of two tokens")


def conditions(record: Record) -> dict[str, Measure]:
    """Return the condition numbers by the names of the attention matrices that any layer has.

    A layer has none of a matrix that it lacks or that is singular.
    """

    def measure(matrix: str) -> Measure:
        def logarithms(model: Model) -> list[float | None]:
            stages = model.get("condition")
            spectra = [{name: one["condition"] for name, one in layer.items()} for layer in model.get("spectra", ())]
            numbers = [layer.get(matrix) for layer in (spectra if stages is None else stages)]
            return [math.log10(number) if number else None for number in numbers]

        title = f"log₁₀ of the condition number of {matrix}"
        return Measure(f"condition-{matrix}", title, "log₁₀ κ", 2, logarithms)

    models = record["models"].values()
    return {name: measure(name) for model in models for layer in model["spectra"] for name in layer}


def layer_measures(record: Record) -> list[Measure]:
    """Return what is drawn by layer beside condition numbers."""
    probed = all(model["probe"] for model in record["models"].values())
    return [*([PROBE] if probed else []), HEADS, CONTRIBUTIONS, TOKENS, SPREAD]


@dataclass(frozen=True)
class Architecture:
    """Models that differ in their seed alone, by seed; by their order where seeds are unknown or not distinct."""

    name: str
    models: Mapping[int, Model]

    @property
    def first(self) -> Model:
        return next(iter(self.models.values()))

    def by_seed(self, value: Callable[[Model], float | None]) -> dict[int, float]:
        """Return the value of every model that has one."""
        return {seed: one for seed, model in self.models.items() if (one := value(model)) is not None}


def architectures(record: Record) -> list[Architecture]:
    """Return the record's architectures in the order of their first models, named as their runs."""
    groups: dict[tuple[str, str], list[Model]] = {}
    for model in record["models"].values():
        groups.setdefault((model["name"], json.dumps(model["config"], sort_keys=True)), []).append(model)
    result = []
    for (name, _), models in groups.items():
        seeds = [model["seed"] for model in models]
        distinct = None not in seeds and len(set(seeds)) == len(seeds)
        result.append(Architecture(name, dict(zip(seeds if distinct else range(len(models)), models, strict=True))))
    return result
