"""The sizes and the mechanisms that a model's name can have, BASE+MECHANISM (sizes.yaml, mechanisms.yaml)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_yaml


@dataclass(frozen=True)
class Base:
    """A size: its configuration fields, its recipe's fields, where both come from, and which of the values are ours."""

    config: Mapping[str, Any]
    recipe: Mapping[str, Any]
    source: str
    note: str = ""


@dataclass(frozen=True)
class MechanismPreset:
    """A mechanism: the part of the model it decides, what it sets there, and the recipe fields that change with it.

    mechanisms.yaml says what its fields mean, of which `recipes` may be chosen by name, `identity-query:recipe=p1`.
    """

    slot: str
    spec: Mapping[str, Any]
    summary: str
    source: str
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)


_SIZES, _MECHANISMS = (read_yaml(Path(__file__).with_name(name)) for name in ("sizes.yaml", "mechanisms.yaml"))
BASES = {name: Base(**fields) for name, fields in _SIZES.items() if not name.startswith(".")}
MECHANISMS = {name: MechanismPreset(**fields) for name, fields in _MECHANISMS.items()}
