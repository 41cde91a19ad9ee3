"""Name -> class, one line per mechanism."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any

from .key_latent import LatentKeys
from .keyvalue_borrowed_values import BorrowedValues
from .keyvalue_first_layer_values import FirstLayerValues
from .keyvalue_first_values_middle_keys import FirstValuesMiddleKeys
from .keyvalue_interpolated_values import InterpolatedValues
from .keyvalue_projected import ProjectedKeyValue
from .keyvalue_shared_adjacent import SharedAdjacent
from .keyvalue_shared_middle import SharedMiddle
from .output import IdentityOutput, LinearOutput
from .projection_block_identity import BlockIdentityProjection
from .projection_identity import IdentityKey, IdentityQuery, IdentityValue
from .projection_linear import LinearProjection
from .query_from_mlp import QueryFromMLP
from .query_nonlinear import NonlinearQuery
from .query_residual import ResidualQuery
from .value_keys import KeysAsValues
from .value_latent import LatentValues

QUERIES = {
    "linear": LinearProjection,
    "identity": IdentityQuery,
    "nonlinear": NonlinearQuery,
    "residual": ResidualQuery,
    "from_mlp": QueryFromMLP,
}
KEYS = {
    "linear": LinearProjection,
    "identity": IdentityKey,
    "block_identity": BlockIdentityProjection,
    "latent": LatentKeys,
}
VALUES = {
    "linear": LinearProjection,
    "identity": IdentityValue,
    "block_identity": BlockIdentityProjection,
    "keys": KeysAsValues,
    "latent": LatentValues,
}
OUTPUTS = {
    "linear": LinearOutput,
    "identity": IdentityOutput,
}
KEY_VALUES = {
    "projected": ProjectedKeyValue,
    "first_layer_values": FirstLayerValues,
    "interpolated_values": InterpolatedValues,
    "shared_middle": SharedMiddle,
    "shared_adjacent": SharedAdjacent,
    "first_values_middle_keys": FirstValuesMiddleKeys,
    "borrowed_values": BorrowedValues,
}


# The type of an option that is a list; those of all others follow from their defaults.
WHOLE_NUMBERS = tuple[int, ...] | None


class ConfigError(ValueError):
    """A configuration that cannot be built; the message is for the person who wrote it."""


@dataclass(frozen=True)
class Mechanism:
    """A mechanism as one layer uses it: its registered name, the class behind it and its checked options."""

    kind: str
    cls: Any = field(repr=False)
    options: Any

    def build(self, config, num_heads: int) -> Any:
        """The module, for so many heads: what the class's `build` returns if it has one, else an instance."""
        return getattr(self.cls, "build", self.cls)(config, num_heads, self.options)

    def clash(self, config, heads: Any) -> str | None:
        """Why it cannot be built in this configuration, or None; a class without `clash` goes with everything.

        heads: their number; of a key/value mechanism, the HeadCounts.
        """
        return self.cls.clash(config, heads, self.options) if hasattr(self.cls, "clash") else None


def suggest(name: str, valid: Iterable[str]) -> str:
    """The tail of an error message about an unknown `name`: the nearest valid names, or all of them."""
    valid, name = sorted(valid), name[:100]  # likeness takes time with the square of the length
    likeness = {word: difflib.SequenceMatcher(None, word, name).ratio() for word in valid}
    near = sorted((word for word in valid if likeness[word] >= 0.5), key=lambda word: -likeness[word])[:3]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid: {', '.join(valid)}"


def make_mechanism(table: Mapping[str, Any], slot: str, spec: Mapping[str, Any]) -> Mechanism:
    """Check one `{"type": ..., **options}` against `table` and fill in the defaults.

    Raises:
        ConfigError: unknown type or option (with the nearest names), or an option of the wrong type.
    """
    if not isinstance(spec, Mapping):
        raise ConfigError(f'`{slot}` is a {{"type": ...}}, found {spec!r}')
    options = dict(spec)
    kind = options.pop("type", None)
    if kind is None:
        raise ConfigError(f'`{slot}` needs a "type", one of {", ".join(table)}; found {dict(spec)}')
    if not isinstance(kind, str) or kind not in table:
        raise ConfigError(f"`{slot}` has no type {kind!r}: {suggest(str(kind), table)}")
    cls = table[kind]
    known = {option.name: option for option in fields(cls.Options)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{slot} {kind!r} has no option {name!r}: {suggest(name, known)}")
        if known[name].type == WHOLE_NUMBERS:
            options[name] = _whole_numbers(f"{slot} {kind!r}", name, value)
            continue
        _check_type(f"{slot} {kind!r}", name, value, known[name].default)
        if isinstance(known[name].default, tuple):
            options[name] = tuple(tuple(row) for row in value)
    return Mechanism(kind, cls, cls.Options(**options))


def _check_type(what: str, name: str, value: Any, default: Any) -> None:
    # The default carries the type; None as a default means an optional whole number.
    if default is MISSING or default is None:
        valid = value is None or (isinstance(value, int) and not isinstance(value, bool))
        expected = "a whole number or null"
    elif isinstance(default, bool):
        valid, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, tuple):
        rows = value if isinstance(value, (list, tuple)) else ()
        valid, expected = bool(rows) and all(map(_is_row, rows)), "a list of rows of four whole numbers, at least one"
        value = next((row for row in rows if not _is_row(row)), value)
    elif isinstance(default, float):
        valid, expected = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value),
            "a number",
        )
    elif isinstance(default, int):
        valid, expected = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        valid, expected = isinstance(value, str), "a name"
    if not valid:
        raise ConfigError(f"{what}: option {name!r} must be {expected}, found {value!r}")


def _whole_numbers(what: str, name: str, value: Any) -> tuple[int, ...] | None:
    if value is not None and not (
        isinstance(value, (list, tuple)) and value and all(type(number) is int for number in value)
    ):
        raise ConfigError(f"{what}: option {name!r} must be a list of whole numbers or null, found {value!r}")
    return None if value is None else tuple(value)


def _is_row(row: Any) -> bool:
    return isinstance(row, (list, tuple)) and len(row) == 4 and all(type(number) is int for number in row)
