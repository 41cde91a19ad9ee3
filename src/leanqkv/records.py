"""The JSON files that commands read back: each has a shape, and one of another shape is refused in a line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from .errors import LeanError
from .files import read_json
from .ranges import COUNT, Range

# A shape is a type or a union of types; a range of numbers; {"a", "b"}: one of these words; (shape,): it may be null;
# [shape]: a list; [shape, ...]: one that is not empty; [shape, shape]: one of two; or a dictionary: fields by name,
# with a `?` behind those that may be missing, and under `str` the shape of all others.
Shape = Any

# Floats hold all of these.
WHOLE, NUMBER = Range(0, 2**63 - 1, whole=True), Range(-1e300, 1e300, words="a number")
POSITIVE = Range(1e-300, 1e300, words="a positive number")
PRECISION = {"choice": str, "milliseconds_per_step": {str: NUMBER}}
HARDWARE = {"device": str, "cpu": str, "threads": (COUNT,), "instructions": str}
RECIPE: Shape = {
    **dict.fromkeys(("steps", "batch_size"), COUNT),
    **dict.fromkeys(("min_learning_rate", "weight_decay"), NUMBER),
    "learning_rate": POSITIVE,
    "warmup_steps": WHOLE,
    "optimizer?": str,
    str: (NUMBER,),
}
DATA = {"description": str, "sha256": str}
TEXT = {**DATA, "train_tokens": WHOLE, "validation_tokens": WHOLE, "bytes_per_token": (POSITIVE,)}
IMAGES = {**DATA, "train_images": WHOLE, "test_images": WHOLE}
# Of record.json: what is read when the command of a finished run is repeated, and what a comparison's report needs.
FINISHED = {
    "final": ({"validation_loss": NUMBER, str: NUMBER},),
    "diverged": ({"step": WHOLE, "reason": str},),
    "evaluations": [{"step": WHOLE, "loss": NUMBER}],
    "tokens_per_second": (NUMBER,),
    "rise": ({"step": WHOLE, "nats": NUMBER},),
    "checkpoints_kept": bool,
}
RECORD = {
    **FINISHED,
    # Of a run that diverged unnoticed they may be infinite.
    "final": ({str: int | float},),
    "evaluations": [{"step": WHOLE, "loss": (int | float,), "accuracy?": (int | float,)}],
    **dict.fromkeys(("role", "name"), str),
    **dict.fromkeys(("seed", "tokens"), WHOLE),
    "context_length": COUNT,
    "seconds": NUMBER,
    "recipe": RECIPE,
    "parameters": {"total": WHOLE, "non_embedding": WHOLE},
    "kv_bytes_per_token": {"bfloat16": NUMBER},
    "data": {**DATA, "vocab_size?": (COUNT,)},  # the rest is by its kind
    "batch_plan": {
        "sha256": str,
        "evaluation_sequences": WHOLE,
        "targets?": {"kind": {"masked", "prefix"}, "words": str},
    },
    "precision": PRECISION,
    "hardware": HARDWARE,
    "versions": dict,
    "git_commit": (str,),
}
# Of run.json: what is read before it is compared with what is asked.
BEGUN = {"precision": str, "precision_timings": {str: NUMBER}, "micro_batch_size": (COUNT,), "hardware?": HARDWARE}
# Of tasks.json, beside a run's record.
TASKS = {"tasks": {str: {"acc?": NUMBER, "examples?": (WHOLE,)}}}
# Of compare.json.
COMPARISON = {
    "groups": [[str, ...], ...],
    "entries": {str: {"row": str, "uptrain?": POSITIVE}},
    "seeds": [WHOLE, ...],
    "grid": ({"seed": WHOLE, "learning_rates": [POSITIVE, ...], "steps?": COUNT},),
    "recipe": {"optimizer?": str, str: (NUMBER,)},
    "chosen_learning_rate?": {str: POSITIVE},
    "threads?": Range(1, 10_000, whole=True),
    "chosen_micro_batch_size?": (COUNT,),
    "places?": {str: PRECISION},
    "cluster_hardware?": HARDWARE,
    **dict.fromkeys(("title", "command"), str),
    **dict.fromkeys(("suite", "scale"), (str,)),
    "notes": [str],
    "base?": str,
}


# Of the descriptions of cached data, by its kind.
SHARDS = [[str, WHOLE, WHOLE]]
CACHED = {
    "data": {
        **dict.fromkeys(("description", "sha256"), str),
        "dtype": {"uint16", "uint32", "int32"},
        "vocab_size": COUNT,
        "bytes_per_token": (POSITIVE,),
        **dict.fromkeys(("train_shards", "validation_shards"), SHARDS),
        "parts?": [dict],
    },
    "prose": {"bytes": WHOLE, "sha256": str},
    "tokenizer": {},
}
# Of the manifest of token files that are being written.
SHARDS_WRITTEN = {
    "shards": [dict.fromkeys(("shard", "tokens", "validation_tokens", "documents", "bytes", "part", "first"), WHOLE)]
}


# By the figure of an evaluation that counts targets which are drawn.
LOSS_NAMES = {
    "masked_tokens": "validation loss of masked tokens",
    "tokens_after_prefix": "validation loss after the prefix",
}


def loss_name(figures: Mapping[str, Any]) -> str:
    """Return the name of the loss among the figures of a run's evaluation."""
    return next((name for counted, name in LOSS_NAMES.items() if counted in figures), "validation loss")


class Misfit(ValueError):
    """The fault of a record; it follows the name of the file."""


def read_record(file: Path, shape: Shape, again: str) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Args:
        again: what to do about a damaged one.

    Raises:
        LeanError: missing, unreadable, or of another shape.
    """
    with reading(file, again) as content:
        check_shape(content, shape)
        return content


@contextmanager
def reading(file: Path, again: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in `file`; an error that the body finds in it becomes one line that names the file."""
    content = read_json(file)
    try:
        yield content
    except Misfit as error:
        raise LeanError(f"{file}{error}; {again}") from None
    except (LeanError, OSError, MemoryError):
        raise
    except Exception as error:  # where no shape says what is wrong, tables and figures raise anything
        raise LeanError(f"{file} is damaged ({shorten(repr(error), 200)}); {again}") from error


def check_shape(value: Any, shape: Shape, where: str = "") -> None:
    """Check a value of JSON.

    Args:
        where: its name.

    Raises:
        Misfit: a field is missing or has another shape.
    """
    if isinstance(shape, tuple):
        if value is not None:
            check_shape(value, shape[0], where)
    elif isinstance(shape, list):
        many = shape[1:] in ([], [...])
        _require(isinstance(value, list) and (shape[1:] == [] or value), "a list", value, where)
        _require(many or len(value) == len(shape), f"{len(shape)} long", value, where)
        for number, one in enumerate(value):
            check_shape(one, shape[0] if many else shape[number], f"{where}[{number}]")
    elif isinstance(shape, dict):
        _require(isinstance(value, dict), "an object", value, where)
        names = {name.removesuffix("?"): name for name in shape if name is not str}
        if missing := [name for name, marked in names.items() if name == marked and name not in value]:
            raise Misfit(f": field {missing[0]!r} is missing")
        for name, one in value.items():
            check_shape(one, shape.get(names.get(name, str), object), f"{where}.{name}".lstrip("."))
    elif isinstance(shape, set):
        _require(isinstance(value, str) and value in shape, " or ".join(sorted(shape)), value, where)
    elif isinstance(shape, Range):
        _require(isinstance(value, int | float), "a number", value, where)
        _require(value in shape, str(shape), value, where)
    else:
        fits = isinstance(value, shape) and (shape in (bool, object) or not isinstance(value, bool))
        _require(fits, {str: "a text", dict: "an object"}.get(shape, str(shape)), value, where)


def _require(fits: Any, kind: str, value: Any, where: str) -> None:
    if not fits:
        found = shorten(repr(value)[:200], 80)
        raise Misfit(f" cannot be read: a field that must be {kind} is not: {where[:80]} is {found}")
