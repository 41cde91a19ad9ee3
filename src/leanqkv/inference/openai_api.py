"""OpenAI's API as data: the fields of a request, the prompts in it, and the form of its answer."""

import asyncio
import inspect
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from fastapi import HTTPException
from torch import Tensor

from ..data.tokenizer import encode_prompt
from ..model.config import LeanConfig
from ..ranges import SHARE, TEMPERATURE, Range
from .batch import Row, Score
from .text import TextStream, check_tokens, encode_chat, longest_token, render_chat, token_text

# Every token is compared with every beginning of every stop string.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_ANSWERS, MAX_N, MAX_LOGPROBS, MAX_BIASES = 256, 128, 20, 1024
MAX_SCORES = 2**20  # of a request: answers times tokens times logarithms
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
FIELDS_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "prediction", "max_tool_calls"),
}
TEXT = {"format": {"type": "text"}}
# Values of unsupported fields that ask for nothing, as false ones do.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "text": (
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "length_penalty": (1,),
    "typical_p": (1,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("text", "input_text", "output_text")
STREAM_OPTIONS = ("include_usage", "include_obfuscation")
# A logarithm that JSON has no number for is told as this one.
LEAST_LOGPROB = -9999.0


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


def check_model(asked: Any, model: str) -> None:
    """Raise ApiError if another model is asked for."""
    if asked != model:
        message = f"there is no model {asked!r:.200} here, only {model!r}"
        raise ApiError(404, message, "model_not_found", param="model")


def checked_fields(body: dict[str, Any], endpoint: "type[Answer]", model: str) -> dict[str, Any]:
    """Return the fields of a request that have an effect.

    Raises:
        ApiError: another model, a field that is not supported, or a value out of its range.
    """
    check_model(body.get("model", model), model)
    rules = COMMON_FIELDS | endpoint.fields
    for name, value in body.items():
        if name in rules:
            description, allowed = rules[name]
            if not allowed(value):
                message = f"{name} is {description}, found {value!r:.100}"
                raise ApiError(400, message, "invalid_value", param=name)
        elif name not in FIELDS_WITHOUT_EFFECT and value and value not in NO_OP_VALUES.get(name, ()):
            raise _unsupported(name)
    body = {name: value for name, value in body.items() if name in rules}
    for name, value in body.get("stream_options", {}).items():
        if value and name not in STREAM_OPTIONS:
            raise _unsupported(f"stream_options.{name}")
    if body.get("stream_options") and not body.get("stream"):
        raise ApiError(400, "stream_options need stream: true", param="stream_options")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise ApiError(400, "top_logprobs need logprobs: true", param="top_logprobs")
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise ApiError(400, "max_tokens is a positive integer, found 0; with echo it may be 0", param="max_tokens")
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise _unsupported("best_of")
    return body


def check_scores(rows: list[Row]) -> None:
    """Raise ApiError for more logarithms of probabilities than the memory should hold."""
    found = 0
    for row in rows:
        if row.top is not None:
            found += (row.max_new_tokens + row.reads_scores * len(row.prompt)) * (row.top + 1)
    if found > MAX_SCORES:
        message = f"a request has up to {MAX_SCORES} logprobs, found {found}; ask for fewer answers, tokens or logprobs"
        raise ApiError(400, message, param="logprobs")


def _unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name:.100} is not supported", "unsupported_parameter", param=name[:100])


class PromptReader:
    """Makes token ids, [length], of the prompts in requests; raises ApiError for those that the model cannot read."""

    def __init__(self, tokenizer: Any, config: LeanConfig):
        self.tokenizer, self._config = tokenizer, config
        longest = longest_token(tokenizer)
        self._characters = math.inf if longest is None else longest * config.max_position_embeddings

    def text(self, text: str) -> Tensor:
        """Return the tokens of a text to be continued."""
        self._check_length(text)
        return self._checked(encode_prompt(self.tokenizer, text)[0])

    def tokens(self, tokens: Sequence[int]) -> Tensor:
        """Return tokens as they are."""
        return self._checked(torch.tensor(tokens, dtype=torch.long))

    def chat(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> Tensor:
        """Return the tokens of a conversation to be continued; `variables` are the chat template's."""
        if not self.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template, it continues text: use /v1/completions")
        text = render_chat(self.tokenizer, messages, variables)
        self._check_length(text)
        return self._checked(encode_chat(self.tokenizer, text)[0])

    def _check_length(self, text: str) -> None:
        """Refuse a text that is too long whatever its tokens are: to find them takes long."""
        if len(text) > self._characters:
            positions = self._config.max_position_embeddings
            message = f"a prompt of {len(text)} characters does not fit the model's {positions} positions; ask for less"
            raise ApiError(400, message, "context_length_exceeded")

    def _checked(self, prompt: Tensor) -> Tensor:
        check_tokens(prompt.tolist(), self._config.vocab_size, self.tokenizer)
        return prompt


@dataclass(eq=False)
class Choice:
    """One of the answers to a request, on its way.

    Attributes:
        text: what its tokens say.
        echo: the prompt, to be repeated before them.
        reported: so many of the row's scores are told, with `characters` in all their texts.
    """

    index: int
    row: Row
    text: TextStream
    echo: str = ""
    new_tokens: int = 0
    reported: int = 0
    characters: int = 0
    ended: bool = False
    finish_reason: str = "length"

    def take(self, token: int | None) -> tuple[str, list[Score]]:
        """Return the text and the scores that a token adds, or None as the end of them all."""
        piece = self.echo + (self.text.finish() if token is None else self.text.add(token))
        self.echo, self.new_tokens = "", self.new_tokens + (token is not None)
        self.ended = token is None or self.text.stopped
        if self.text.stopped or (token is None and self.row.ended):
            self.finish_reason = "stop"
        scores: list[Score] = []
        if piece or token is None:  # tokens of a stop string have no text, and are not told
            end = self.new_tokens + (len(self.row.prompt) if self.row.reads_scores else 0)
            scores = self.row.scores[self.reported : end]
            self.reported += len(scores)
        return piece, scores


# What an answer consists of: pieces of text, each with its tokens' scores if they are asked for.
Pieces = AsyncIterator[tuple[Choice, str, list[Score]]]


@dataclass
class Answer(ABC):
    """The answer to a request on its way. Each endpoint has a subclass: how it reads prompts and writes answers."""

    id: str
    model: str
    body: dict[str, Any]  # the request
    tokenizer: Any
    prompts: list[Tensor]  # token ids, [length] each
    choices: list[Choice] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    fields = dict[str, Rule]()

    @staticmethod
    @abstractmethod
    def encode(body: dict[str, Any], reader: PromptReader) -> list[Tensor]:
        """Return the token ids of the prompts in a request."""

    @staticmethod
    def echoes(body: dict[str, Any], tokenizer: Any) -> list[str]:
        """Return what stands before the answers to each prompt."""
        return [""]

    @staticmethod
    def top_logprobs(body: dict[str, Any]) -> int | None:
        """Return for how many tokens of every position a logarithm of their probability is asked; None: for none."""
        return None

    @abstractmethod
    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """Return the answer in one piece."""

    @abstractmethod
    def events(self, pieces: Pieces) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""

    @property
    def lengths(self) -> tuple[int, int]:
        """How many tokens there are in prompts and in answers."""
        return sum(map(len, self.prompts)), sum(choice.new_tokens for choice in self.choices)


class Completion(Answer):
    """/v1/completions: texts continued."""

    fields = CHOICE_FIELDS | {
        "prompt": ("a string, token ids, or a list of either", _is_prompt),
        "max_tokens": _range(Range(0, whole=True, words="a positive integer")),
        "echo": BOOLEAN,
        "logprobs": (f"{LOGPROBS[0]}", lambda value: value is False or LOGPROBS[1](value)),
        "best_of": COUNT,
    }
    kinds = ("text_completion", "text_completion")  # in one piece, and streamed
    opening: dict[str, Any] = {"text": ""}

    @staticmethod
    def encode(body: dict[str, Any], reader: PromptReader) -> list[Tensor]:
        return [reader.text(one) if isinstance(one, str) else reader.tokens(one) for one in _prompts(body)]

    @staticmethod
    def echoes(body: dict[str, Any], tokenizer: Any) -> list[str]:
        if not body.get("echo"):
            return [""] * len(_prompts(body))
        decode = tokenizer.backend_tokenizer.decode
        return [one if isinstance(one, str) else decode(one, skip_special_tokens=False) for one in _prompts(body)]

    @staticmethod
    def top_logprobs(body: dict[str, Any]) -> int | None:
        logprobs = body.get("logprobs", False)
        return None if logprobs is False else logprobs

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        texts, scores = [""] * len(self.choices), [list[Score]() for _ in self.choices]
        async for choice, text, new in pieces:
            texts[choice.index] += text
            scores[choice.index] += new

        def assembled() -> dict[str, Any]:
            contents = map(self._content, texts)
            parts = zip(self.choices, contents, scores, strict=True)
            return self._body([self._choice(*part, last=True) for part in parts]) | {"usage": self._usage()}

        return await asyncio.to_thread(assembled)  # the scores of a long prompt take long

    async def events(self, pieces: Pieces) -> AsyncIterator[str]:
        usage_asked = self.body.get("stream_options", {}).get("include_usage")
        usage = {"usage": None} if usage_asked else {}

        def event(choice: Choice, *args: Any, **options: Any) -> str:
            return _event(self._body([self._choice(choice, *args, **options)], streamed=True) | usage)

        for choice in self.choices:
            yield event(choice, self.opening)
        try:
            async for choice, text, scores in pieces:
                if scores:
                    yield await asyncio.to_thread(event, choice, self._content(text, streamed=True), scores)
                elif text:
                    yield event(choice, self._content(text, streamed=True))
                if choice.ended:
                    yield event(choice, self._content("", streamed=True), last=True)
            if usage_asked:
                yield _event(self._body([], streamed=True) | {"usage": self._usage()})
        except ApiError as error:
            yield _event(error_body(error))
        yield "data: [DONE]\n\n"

    def _content(self, text: str, streamed: bool = False) -> dict[str, Any]:
        return {"text": text}

    def _choice(
        self, choice: Choice, content: dict[str, Any], scores: Sequence[Score] = (), last: bool = False
    ) -> dict[str, Any]:
        logprobs = self._logprobs(choice, scores) if scores else None
        reason = choice.finish_reason if last else None
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, choice: Choice, scores: Sequence[Score]) -> dict[str, Any]:
        tokens = [token_text(self.tokenizer, score.token) for score in scores]
        tops: list[dict[str, float] | None] = []
        for token, score in zip(tokens, scores, strict=True):
            top: dict[str, float] = {}
            for other, logprob in score.top:  # several tokens may have one text; the likeliest counts
                top.setdefault(token_text(self.tokenizer, other), _finite(logprob))
            if score.logprob is not None:
                top.setdefault(token, _finite(score.logprob))
            tops.append(None if score.logprob is None else top)
        offsets = [choice.characters]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        choice.characters = offsets.pop()
        logprobs = [None if score.logprob is None else _finite(score.logprob) for score in scores]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _usage(self) -> dict[str, int]:
        prompt, new = self.lengths
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _body(self, choices: list[dict[str, Any]], streamed: bool = False) -> dict[str, Any]:
        about = {"id": self.id, "object": self.kinds[streamed], "created": self.created, "model": self.model}
        return {**about, "choices": choices}


class ChatCompletion(Completion):
    """/v1/chat/completions: a conversation continued."""

    fields = CHOICE_FIELDS | {
        "messages": ("a list of messages", lambda value: isinstance(value, list)),
        "chat_template_kwargs": OBJECT,
        "max_completion_tokens": COUNT,
        "max_tokens": COUNT,
        "logprobs": BOOLEAN,
        "top_logprobs": LOGPROBS,
    }
    kinds = ("chat.completion", "chat.completion.chunk")
    opening = {"delta": {"role": "assistant", "content": ""}}

    @staticmethod
    def encode(body: dict[str, Any], reader: PromptReader) -> list[Tensor]:
        return [_read_messages(body.get("messages", []), reader, body.get("chat_template_kwargs", {}))]

    @staticmethod
    def top_logprobs(body: dict[str, Any]) -> int | None:
        return body.get("top_logprobs", 0) if body.get("logprobs") else None

    def _content(self, text: str, streamed: bool = False) -> dict[str, Any]:
        return {"delta": {"content": text}} if streamed else {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, choice: Choice, scores: Sequence[Score]) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = token_text(self.tokenizer, token)
            content = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": _finite(logprob), "bytes": content}

        content = [
            {**entry(score.token, score.logprob), "top_logprobs": [entry(*other) for other in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}


class Response(Answer):
    """/v1/responses: a text or a conversation continued."""

    fields = {
        "input": ("a string or a list", lambda value: isinstance(value, str | list)),
        "instructions": STRING,
        "max_output_tokens": COUNT,
    }

    @staticmethod
    def encode(body: dict[str, Any], reader: PromptReader) -> list[Tensor]:
        items = body.get("input", [])
        if isinstance(items, str) or (items and isinstance(items[0], dict) and items[0].get("type") in TEXT_PARTS):
            items = [{"role": "user", "content": items}]  # one message, or the parts of one
        if body.get("instructions"):
            has_system = bool(items) and isinstance(items[0], dict) and items[0].get("role") == "system"
            items = [{"role": "system", "content": body["instructions"]}, *items[has_system:]]
        return [_read_messages(items, reader, {})]

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        return self._ended("".join([text async for _, text, _ in pieces]))

    async def events(self, pieces: Pieces) -> AsyncIterator[str]:
        numbers, whole = count(), ""
        place = {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> str:
            return _event({"type": kind, "sequence_number": next(numbers), **fields})

        yield event("response.created", response=self._body("queued"))
        yield event("response.in_progress", response=self._body("in_progress"))
        yield event("response.output_item.added", output_index=0, item=self._message("in_progress"))
        yield event("response.content_part.added", **place, part=_part(""))
        try:
            async for _, text, _ in pieces:
                whole += text
                if text:
                    yield event("response.output_text.delta", **place, delta=text, logprobs=[])
        except ApiError as error:
            failure = {"code": "server_error", "message": error.detail}
            yield event("error", **failure, param=None)
            yield event("response.failed", response=self._body("failed", error=failure))
            return
        yield event("response.output_text.done", **place, text=whole, logprobs=[])
        yield event("response.content_part.done", **place, part=_part(whole))
        response = self._ended(whole)
        yield event("response.output_item.done", output_index=0, item=response["output"][0])
        yield event(f"response.{response['status']}", response=response)

    def _ended(self, text: str) -> dict[str, Any]:
        prompt, new = self.lengths
        usage = {
            "input_tokens": prompt,
            "output_tokens": new,
            "total_tokens": prompt + new,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        cut = self.choices[0].finish_reason == "length"
        status, details = ("incomplete", {"reason": "max_output_tokens"}) if cut else ("completed", None)
        return self._body(status, output=[self._message(status, text)], incomplete_details=details, usage=usage)

    def _body(self, status: str, **fields: Any) -> dict[str, Any]:
        about = {"id": f"resp_{self.id}", "object": "response", "created_at": self.created, "model": self.model}
        tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
        return {**about, "status": status, "output": [], "error": None, "incomplete_details": None, **tools, **fields}

    def _message(self, status: str, *texts: str) -> dict[str, Any]:
        about = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status}
        return {**about, "content": [_part(text) for text in texts]}


ENDPOINTS: dict[str, type[Completion | Response]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/responses": Response,
}


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _prompts(body: dict[str, Any]) -> list[str | list[int]]:
    prompt = body.get("prompt", "")
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _read_messages(messages: list[Any], reader: PromptReader, variables: dict[str, Any]) -> Tensor:
    """Return the token ids of a conversation, [length]; `variables` are the chat template's.

    Raises:
        ApiError: the model has no chat template or it refuses these messages, or one of them has more than text.
    """
    if "chat_template" in variables:  # a program, which could run forever
        raise ApiError(400, "chat_template is not supported, only the model's own", "unsupported_parameter")
    if not messages:
        raise ApiError(400, "there are no messages; give at least one", param="messages")
    reserved = inspect.signature(reader.tokenizer.apply_chat_template).parameters.keys()
    if taken := sorted(variables.keys() & reserved):
        raise _unsupported(f"chat_template_kwargs.{taken[0]}")
    return reader.chat([_read_message(message) for message in messages], variables)


def _read_message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"a message is an object with role and content, found {message!r:.100}", param="messages")
    role, content = message.get("role"), message.get("content") or ""
    if role not in ROLES:
        raise ApiError(
            400, f"the role of a message is one of {', '.join(ROLES)}, found {role!r:.100}", param="messages"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise _unsupported(name)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ApiError(400, f"content is a string or a list of parts, found {content!r:.100}", param="messages")
    for part in parts:
        if part.get("type") not in TEXT_PARTS:
            raise _unsupported(f"{part.get('type')}")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"the text of a part is a string, found {part.get('text')!r:.100}", param="messages")
    # OpenAI's newer name for the system's messages, which templates do not know.
    role = "system" if role == "developer" else role
    return {"role": role, "content": " ".join(part["text"] for part in parts)}
