"""A configuration with some fields, or some layers' mechanisms, changed."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..model.config import LeanConfig
from ..model.plan import LAYER_SLOTS
from ..model.registry import make_mechanism


def with_fields(config: LeanConfig, **fields: Any) -> LeanConfig:
    """Return the configuration with these fields in place of its own."""
    return LeanConfig(**{**config.as_overrides(), **fields})


def set_mechanisms(config: LeanConfig, slot: str, specs: Mapping[int, Mapping[str, Any]]) -> LeanConfig:
    """Return the configuration with other mechanisms in some layers.

    `slot` is "query", "key", "value" or "output", and `specs` says by layer what it becomes; other layers keep theirs.
    Layers with the same mechanism are written as one entry.
    """
    if not specs:
        return config
    layers: dict[Any, list[int]] = {}
    for layer in config.plan.layers:
        wanted = specs.get(layer.layer)
        mechanism = getattr(layer, slot) if wanted is None else make_mechanism(LAYER_SLOTS[slot], slot, wanted)
        if mechanism.kind != "linear":
            layers.setdefault(mechanism, []).append(layer.layer)
    entries = [{"type": one.kind, **asdict(one), "layers": numbers} for one, numbers in layers.items()]
    return with_fields(config, **{slot: entries})
