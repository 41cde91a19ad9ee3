"""Base sizes: the shapes of the papers' models, and some of our own for a CPU (sizes.yaml)."""

from collections.abc import Mapping
from dataclasses import dataclass
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


BASES: dict[str, Base] = {
    name: Base(**size)
    for name, size in read_yaml(Path(__file__).with_name("sizes.yaml")).items()
    if not name.startswith(".")
}
