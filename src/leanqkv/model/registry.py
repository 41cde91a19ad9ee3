"""The base classes of mechanisms, and how a configuration chooses one by its name; the linear projections, too.

Linear: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, ClassVar

from torch import nn


class ConfigError(ValueError):
    """A configuration that cannot be built; the message is for the person who wrote it."""


@dataclass(frozen=True)
class Mechanism:
    """One mechanism with its options, which are the fields of the class."""

    kind: ClassVar[str]  # its name in a configuration

    def clash(self, config, heads: Any) -> str | None:
        """Return why it cannot be built in this configuration, or None.

        heads: how many of them the layer computes; for a mechanism that shares heads between layers, the HeadCounts.
        """


class Projection(Mechanism):
    """Makes the query, key, value or output of a layer. The attributes are those of a plain projection."""

    scale: float = 1.0  # factor on q k^T
    bias: bool = False  # has a bias of its own, whatever the configuration says
    reads_mlp = False  # a query that also takes the hidden activations of the previous block's MLP
    linear_in_first_layer = False
    reuses_keys = False  # a value that is the key
    reads_keys = False  # a value that is made of keys too
    passes_input = False  # the input itself is in it, multiplied by no weight
    before_rotary: bool = False  # a key that is cached before rotary positions, which turn it whenever it is read
    columns: tuple[int, ...] | None = None  # complex ones of a key's latent, by frequency
    attention = "heads"  # the attention that can compute it, in mechanisms.py

    def in_layer(self, config, layer: int, num_heads: int, rope: str | None) -> "Projection":
        """Return the mechanism with the options that it has in a layer: those of a latent depend on rotary positions.

        rope: the field with the rotary parameters of the layer; None: no rotary positions.

        Raises:
            ConfigError: it cannot be built in this layer.
        """
        return self

    def latent_rank(self, config, num_heads: int) -> int | None:
        """Return the columns of the latent that is cached in place of that many heads; None: the heads are."""

    def build(self, config, num_heads: int) -> nn.Module | None:
        """Return the module that projects the stream; None: there is none."""
        raise NotImplementedError

    def build_up(self, config, num_heads: int, key_columns: int) -> nn.Module | None:
        """Return the module that makes the heads of a latent; None: they are no latent.

        key_columns: the columns of the layer's cached keys.
        """


class LinearProjection(Projection):
    """`X W` (+ b), from `hidden_size` to `num_heads * head_dim`; biased where `config.attention_bias` says so."""

    kind = "linear"

    def build(self, config, num_heads: int) -> nn.Linear:
        """Return a plain nn.Linear: quantizers and adapters recognize one by its exact type."""
        return nn.Linear(config.hidden_size, num_heads * config.head_dim, bias=config.attention_bias)


class LinearOutput(Projection):
    """The heads side by side times W_O, from `num_heads * head_dim` to `hidden_size`."""

    kind = "linear"

    def build(self, config, num_heads: int) -> nn.Linear:
        return nn.Linear(num_heads * config.head_dim, config.hidden_size, bias=config.attention_output_bias)


def width_clash(config, what: str) -> str | None:
    """Return why the query heads cannot be the stream cut into pieces, or None."""
    if config.num_attention_heads * config.head_dim == config.hidden_size:
        return None
    return (
        f"{what} needs num_attention_heads * head_dim = hidden_size, found "
        f"{config.num_attention_heads} * {config.head_dim} != {config.hidden_size}"
    )


def slices_clash(config, what: str) -> str | None:
    """Return why the key/value heads cannot be the stream cut into pieces, or None."""
    if config.num_key_value_heads == config.num_attention_heads:
        return width_clash(config, what)
    return (
        f"{what} needs as many key/value heads as query heads (MHA): with grouped heads the input's "
        f"{config.num_attention_heads} slices do not fit {config.num_key_value_heads} key/value heads"
    )


Rows = tuple[tuple[int, int, int, int], ...]


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _are_whole(values: Any, length: int | None = None) -> bool:
    return isinstance(values, list | tuple) and len(values) == (length or len(values)) and all(map(_is_whole, values))


# The types that options have: what they must be, in words and as a test.
OPTION_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", _is_whole),
    int | None: ("a whole number or null", lambda value: value is None or _is_whole(value)),
    float: ("a number", lambda value: _is_whole(value) or (isinstance(value, float) and isfinite(value))),
    str: ("a name", lambda value: isinstance(value, str)),
    tuple[int, ...] | None: (
        "a list of whole numbers or null",
        lambda value: value is None or (_are_whole(value) and len(value) > 0),
    ),
    Rows: (
        "a list of rows of four whole numbers, at least one",
        lambda value: isinstance(value, list | tuple) and len(value) > 0 and all(_are_whole(row, 4) for row in value),
    ),
}


def by_kind(*classes: Any) -> dict[str, Any]:
    """Return the classes by their names in a configuration."""
    return {cls.kind: cls for cls in classes}


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return the tail of an error message about an unknown `name`: the nearest valid names, or all of them."""
    valid, name = sorted(valid), name[:100]  # likeness takes time with the square of the length
    likeness = {word: difflib.SequenceMatcher(None, word, name).ratio() for word in valid}
    near = sorted((word for word in valid if likeness[word] >= 0.5), key=lambda word: -likeness[word])[:3]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid: {', '.join(valid)}"


def make_mechanism(table: Mapping[str, Any], slot: str, spec: Mapping[str, Any]) -> Any:
    """Return the mechanism of `table` that `{"type": ..., **options}` describes.

    Raises:
        ConfigError: unknown type or option (with the nearest names), or an option of the wrong type.
    """
    options = dict(spec)
    kind = options.pop("type", None)
    if kind is None:
        raise ConfigError(f'`{slot}` needs a "type", one of {", ".join(table)}; found {dict(spec)}')
    if not isinstance(kind, str) or kind not in table:
        raise ConfigError(f"`{slot}` has no type {kind!r}: {suggest(str(kind), table)}")
    known: dict[str, Any] = {option.name: option.type for option in fields(table[kind])}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{slot} {kind!r} has no option {name!r}: {suggest(name, known)}")
        expected, is_valid = OPTION_TYPES[known[name]]
        if not is_valid(value):
            if known[name] is Rows and isinstance(value, list | tuple):
                value = next((row for row in value if not _are_whole(row, 4)), value)
            raise ConfigError(f"{slot} {kind!r}: option {name!r} must be {expected}, found {value!r}")
        if isinstance(value, list):
            options[name] = tuple(tuple(row) if isinstance(row, list) else row for row in value)
    return table[kind](**options)
