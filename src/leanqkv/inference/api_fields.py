"""The fields of a request to OpenAI's API: the values that each may have, and the refusal of all others."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import HTTPException

from ..ranges import SHARE, TEMPERATURE, Range

# Every token is compared with every beginning of every stop string.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_N, MAX_LOGPROBS, MAX_BIASES = 128, 20, 1024
FIELDS_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "prediction"),
}
# Values of unsupported fields that ask for nothing, as false ones do.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "skip_special_tokens"), (True,)),
    "spaces_between_special_tokens": (True,),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
STREAM_OPTIONS = ("include_usage", "include_obfuscation")


class ApiError(HTTPException):
    """An error as the answer to a request, with OpenAI's code and the field at fault where there are such."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        param: str | None = None,
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param


def error_body(error: Exception) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    status = getattr(error, "status_code", 500)
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    message = str(getattr(error, "detail", f"{type(error).__name__}: {error}")).encode(errors="replace").decode()
    about = {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    return {"error": {"message": message, "type": kind, **about}}


# What a field of a request may be: in words, and as a test.
Rule = tuple[str, Callable[[Any], bool]]


def _range(allowed: Range) -> Rule:
    return str(allowed), lambda value: value in allowed


def _all(items: Any, allowed: Callable[[Any], bool]) -> bool:
    return isinstance(items, list) and bool(items) and all(map(allowed, items))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    kinds = (lambda item: isinstance(item, str), _is_token, lambda item: _all(item, _is_token))
    return any(_all(value, kind) for kind in kinds)


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return stops == [] or (
        _all(stops, lambda stop: isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS)
        and len(stops) <= MAX_STOPS
    )


def _are_biases(value: Any) -> bool:
    allowed = Range(-100, 100)
    return (
        isinstance(value, dict)
        and len(value) <= MAX_BIASES
        and all(name.isascii() and name.isdecimal() and len(name) < 10 for name in value)
        and all(bias in allowed for bias in value.values())
    )


BOOLEAN: Rule = ("true or false", lambda value: isinstance(value, bool))
STRING: Rule = ("a string", lambda value: isinstance(value, str))
OBJECT: Rule = ("an object", lambda value: isinstance(value, dict))
COUNT = _range(Range(1, whole=True, words="a positive integer"))
COMMON_FIELDS: dict[str, Rule] = {
    "model": STRING,
    "temperature": _range(TEMPERATURE),
    "top_p": _range(Range(math.ulp(0.0), 1, words="a number above 0 and up to 1")),
    "top_k": _range(Range(-1, 2**31 - 1, whole=True)),
    "min_p": _range(SHARE),
    "seed": _range(Range(1 - 2**63, 2**63 - 1, whole=True, words="an integer of 64 bits")),
    "repetition_penalty": _range(Range(0.01, 100)),
    "frequency_penalty": _range(Range(-2, 2)),
    "presence_penalty": _range(Range(-2, 2)),
    "logit_bias": (f"an object of up to {MAX_BIASES} token ids and numbers from -100 to 100", _are_biases),
    "stream": BOOLEAN,
}
CHOICE_FIELDS: dict[str, Rule] = {
    "n": _range(Range(1, MAX_N, whole=True)),
    "stop": (f"a string of 1 to {MAX_STOP_CHARACTERS} characters, or up to {MAX_STOPS} of them", _are_stops),
    "stream_options": OBJECT,
}
LOGPROBS = _range(Range(0, MAX_LOGPROBS, whole=True))
COMPLETION_FIELDS: dict[str, Rule] = CHOICE_FIELDS | {
    "prompt": ("a string, token ids, or a list of either", _is_prompt),
    "max_tokens": _range(Range(0, whole=True, words="a positive integer")),
    "echo": BOOLEAN,
    "logprobs": (LOGPROBS[0], lambda value: value is False or LOGPROBS[1](value)),
    "best_of": COUNT,
}
CHAT_FIELDS: dict[str, Rule] = CHOICE_FIELDS | {
    "messages": ("a list of messages", lambda value: isinstance(value, list)),
    "chat_template_kwargs": OBJECT,
    "max_completion_tokens": COUNT,
    "max_tokens": COUNT,
    "logprobs": BOOLEAN,
    "top_logprobs": LOGPROBS,
}


def check_model(asked: Any, model: str) -> None:
    """Raise ApiError if another model is asked for."""
    if asked != model:
        message = f"there is no model {asked!r:.200} here, only {model!r}"
        raise ApiError(404, message, "model_not_found", param="model")


def checked_fields(body: dict[str, Any], fields: Mapping[str, Rule], model: str) -> dict[str, Any]:
    """Return the fields of a request that have an effect; `fields` are those of its endpoint alone.

    Raises:
        ApiError: another model, a field that is not supported, or a value out of its range.
    """
    check_model(body.get("model", model), model)
    rules = {**COMMON_FIELDS, **fields}
    for name, value in body.items():
        if name in rules:
            description, allowed = rules[name]
            if not allowed(value):
                message = f"{name} is {description}, found {value!r:.100}"
                raise ApiError(400, message, "invalid_value", param=name)
        elif name not in FIELDS_WITHOUT_EFFECT and value and value not in NO_OP_VALUES.get(name, ()):
            raise unsupported(name)
    body = {name: value for name, value in body.items() if name in rules}
    for name, value in body.get("stream_options", {}).items():
        if value and name not in STREAM_OPTIONS:
            raise unsupported(f"stream_options.{name}")
    if body.get("stream_options") and not body.get("stream"):
        raise ApiError(400, "stream_options need stream: true", param="stream_options")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise ApiError(400, "top_logprobs need logprobs: true", param="top_logprobs")
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise ApiError(400, "max_tokens is a positive integer, found 0; with echo it may be 0", param="max_tokens")
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise unsupported("best_of")
    return body


def unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name:.100} is not supported", "unsupported_parameter", param=name[:100])
