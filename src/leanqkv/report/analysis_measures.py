"""What the tables and figures of an analysis read from its record."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Record = Mapping[str, Any]
Model = Mapping[str, Any]  # one model's part of the record; or, of logits and conditions, a stage of its training
Layers = Sequence[float | None]  # a value for every layer; None where a layer has none

SCORES = {"previous_token": "previous-token", "induction": "induction", "matching": "matching"}  # of heads


@dataclass(frozen=True)
class Measure:
    """Something that every layer of a model has a value of."""

    name: str
    title: str
    unit: str
    digits: int
    of: Callable[[Model], Layers]

    def mean(self, model: Model) -> float | None:
        """Return the mean over the layers that have a value; None where none has."""
        known = [value for value in self.of(model) if value is not None]
        return float(np.mean(known)) if known else None


def similarity(name: str, title: str) -> Measure:
    """Return the measure of the mean cosine of "heads", "contributions" or "tokens"."""
    return Measure(name, title, "cosine", 3, lambda model: [layer["mean"] for layer in model["similarity"][name]])


def condition(matrix: str) -> Measure:
    """Return the measure of a matrix' condition number; None where a layer has no such matrix, or a singular one."""

    def logarithms(model: Model) -> Layers:
        if "condition" in model:
            numbers = [layer.get(matrix) for layer in model["condition"]]
        else:
            numbers = [layer.get(matrix, {}).get("condition") for layer in model["spectra"]]
        return [math.log10(number) if number else None for number in numbers]

    return Measure(f"condition-{matrix}", f"log₁₀ of the condition number of {matrix}", "log₁₀ κ", 2, logarithms)


PROBE = Measure("probe", "Loss of the linear probe", "validation loss", 3, lambda m: m["probe"]["losses"])
SPREAD = Measure("spread", "Spread of the attention logits", "standard deviation", 3, lambda m: m["logit_spread"])
HEADS = similarity("heads", "Similarity of two heads' outputs before W_O")
CONTRIBUTIONS = similarity("contributions", "Similarity of what two heads add to the output, after W_O")
TOKENS = similarity("tokens", "Similarity of two tokens")


def conditions(record: Record) -> dict[str, Measure]:
    """Return the condition numbers by the names of the attention matrices that any layer has."""
    models = record["models"].values()
    return {name: condition(name) for model in models for layer in model["spectra"] for name in layer}


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
