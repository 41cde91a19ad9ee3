"""Mechanisms that a model's name can have, `BASE+MECHANISM:option=value` (mechanisms.yaml)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_yaml


@dataclass(frozen=True)
class MechanismPreset:
    """A mechanism: the part of the model it decides, what it sets there, and the recipe fields that change with it.

    mechanisms.yaml says what its fields mean.
    """

    slot: str
    spec: Mapping[str, Any]
    summary: str
    source: str
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


MECHANISMS: dict[str, MechanismPreset] = {
    name: MechanismPreset(**fields) for name, fields in read_yaml(Path(__file__).with_name("mechanisms.yaml")).items()
}
