"""A configuration with some fields, or some layers' mechanisms, changed."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..model.config import LeanConfig


def changed(config: LeanConfig, **fields: Any) -> LeanConfig:
    return LeanConfig(**{**config.as_overrides(), **fields})


def respell(config: LeanConfig, slot: str, specs: Mapping[int, Mapping[str, Any]]) -> LeanConfig:
    """`slot` ("query", "key", "value", "output") of the layers in `specs` becomes what they say; others stay.

    Layers with the same mechanism are written as one entry.
    """
    if not specs:
        return config
    entries: list[dict[str, Any]] = []
    for layer in config.plan.layers:
        mechanism = getattr(layer, slot)
        spec = dict(specs.get(layer.layer) or {"type": mechanism.kind, **asdict(mechanism.options)})
        if spec["type"] == "linear":
            continue
        for entry in entries:
            if {name: value for name, value in entry.items() if name != "layers"} == spec:
                entry["layers"].append(layer.layer)
                break
        else:
            entries.append({**spec, "layers": [layer.layer]})
    return changed(config, **{slot: entries})
