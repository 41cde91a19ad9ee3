"""The name of a model, `BASE+MECHANISM:option=value+field=value`, and the configuration it stands for."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.plan import LAYER_SLOTS
from ..model.registry import suggest
from .catalog import BASES, MECHANISMS

Options = tuple[tuple[str, Any], ...]  # in the order they were given

# What each slot of the whole model decides, in words and as configuration fields; one mechanism alone can fill it.
_MODEL_SLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "key_value": ("how heads are shared between layers", ("key_value",)),
    "heads": ("the key/value heads", ("num_key_value_heads",)),
    "latent": ("the latent's widths", ("kv_lora_rank", "qk_rope_head_dim")),
    "output_gate": ("the gate of attention's output", ("output_gate",)),
    "depth_average": ("the averages over depth", ("depth_average",)),
    "hyper_connections": ("the connections between layers", ("hyper_connections",)),
}


# Lists, though they may have one entry.
LISTS = ("layers", "columns", "window_layers", "rope_layers")


@dataclass(frozen=True)
class ModelName:
    """The parts of a name: the base, the mechanisms with their options, the fields set by hand, and recipes chosen."""

    base: str
    mechanisms: tuple[tuple[str, Options], ...]
    overrides: Options
    recipes: Mapping[str, str] = field(default_factory=dict)


def parse_name(name: str) -> ModelName:
    """Read `BASE+MECHANISM+...`; each part after the base is a mechanism or a configuration field, `field=value`.

    Raises:
        LeanError: an unknown base, mechanism or recipe (the nearest names are offered), or an option without a value.
    """
    base, *parts = name.split("+")
    if base not in BASES:
        raise LeanError(f"unknown base {base!r} in {name!r}: {suggest(base, BASES)}")
    mechanisms, overrides, recipes = [], [], {}
    for part in parts:
        head, _, options = part.partition(":")
        if "=" in head:
            overrides.extend(_parse_options(part, name))
        elif head in MECHANISMS:
            given, known = dict(_parse_options(options, name)), MECHANISMS[head].recipes
            if known and "recipe" in given:
                chosen = given.pop("recipe")
                if not isinstance(chosen, str) or chosen not in known:
                    raise LeanError(f"{head} has no recipe {chosen!r} in {name!r}: {suggest(str(chosen), known)}")
                recipes[head] = chosen
            mechanisms.append((head, tuple(given.items())))
        else:
            raise LeanError(f"unknown mechanism {head!r} in {name!r}: {suggest(head, MECHANISMS)}")
    return ModelName(base, tuple(mechanisms), tuple(overrides), recipes)


def preset(base: str, *mechanisms: str, **overrides: Any) -> LeanConfig:
    """Return the configuration of a base size with mechanisms and overrides.

    `preset("gpt2-124m", "identity-query", num_hidden_layers=6)`; names may carry options, `skipv1:ratio=0.25`.

    Raises:
        LeanError: unknown names. ConfigError: a combination that cannot be built.
    """
    model = "+".join((base, *mechanisms))
    parsed = parse_name(model)
    given = {**dict(parsed.overrides), **overrides}
    config: dict[str, Any] = {**BASES[parsed.base].config, **given}
    filled: dict[str, str] = {}
    for name, options in parsed.mechanisms:
        slot, spec = MECHANISMS[name].slot, {**MECHANISMS[name].spec, **dict(options)}
        if slot in LAYER_SLOTS:  # one entry per group of layers
            config[slot] = [*config.get(slot, ()), spec]
            continue
        decides, fields_set = _MODEL_SLOTS[slot]
        clashes = [(filled[slot], name)] if slot in filled else [(name, one) for one in fields_set if one in given]
        for first, second in clashes:
            raise LeanError(f"{first} and {second} clash: both decide {decides}; use one of them")
        filled[slot] = name
        config |= _FIELDS_OF[slot](name, spec, config) if slot in _FIELDS_OF else {slot: spec}
    floats = {field.name for field in fields(LeanConfig) if field.type in (float, float | None)}
    config = {key: float(value) if key in floats and type(value) is int else value for key, value in config.items()}
    try:
        return LeanConfig(**config)
    except StrictDataclassError as error:  # a value of the wrong type
        raise LeanError(f"{model}: {str(error).splitlines()[-1].strip()}") from None


def _grouped(name: str, options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    _check_options(name, options)
    heads = config["num_attention_heads"]
    group = options.get("group_size", heads)
    if not isinstance(group, int) or group < 1 or heads % group:
        raise LeanError(f"{name}: group_size must divide the {heads} query heads, found {group!r}")
    return {"num_key_value_heads": heads // group}


def _latent(name: str, options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2's proportions, which are those of P3 too: a latent of 4 heads, a rotary key of half a head."""
    _check_options(name, options)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope_dim = head_dim // 2 if config.get("position_embedding_type") == "rope" else 0
    return {
        "kv_lora_rank": 4 * head_dim if options["rank"] is None else options["rank"],
        "qk_rope_head_dim": rope_dim if options["rope_dim"] is None else options["rope_dim"],
    }


# Slots whose options are translated into configuration fields.
_FIELDS_OF = {"heads": _grouped, "latent": _latent}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    valid = MECHANISMS[name].spec
    if unknown := options.keys() - valid.keys():
        choices = f": valid: {', '.join(valid)}" if valid else ""
        raise LeanError(f"{name} has no option {min(unknown)!r}{choices}")


def _parse_options(text: str, name: str) -> list[tuple[str, Any]]:
    """`layers=0,3,rank=64` -> [("layers", [0, 3]), ("rank", 64)]: a part without `=` continues the value before it."""
    pairs: list[tuple[str, list[str]]] = []
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if equals:
            pairs.append((key.strip(), [value]))
        elif pairs:
            pairs[-1][1].append(part)
        else:
            raise LeanError(f"option {part!r} in {name!r} has no value; write option=value")
    if len({key for key, _ in pairs}) < len(pairs):
        raise LeanError(f"an option is given twice in {text!r} of {name!r}; give it once")
    try:
        return [
            (key, [yaml.safe_load(v) for v in values] if len(values) > 1 or key in LISTS else _scalar(values[0]))
            for key, values in pairs
        ]
    except yaml.YAMLError as error:
        raise LeanError(f"cannot read the options {text!r} in {name!r}: {error}") from None


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # YAML reads 1e-3 as a word
    return value
