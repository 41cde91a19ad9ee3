"""OpenAI's API as data: the fields of a request, the prompt in it, and the form of its answer."""

import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import HTTPException
from torch import Tensor

from ..data.tokenizer import encode_prompt
from ..ranges import TEMPERATURE

COMMON_FIELDS = {"model", "temperature", "top_p", "seed", "stream"}
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
FIELDS_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "tool_choice"),
}
# Every token is compared with every beginning of every stop string.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
# Values of unsupported fields that ask for nothing, as false ones do.
NO_OP_VALUES: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}


class ApiError(HTTPException):
    """An error as the answer to a request, with OpenAI's code for it where there is one."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(status, message, headers)
        self.code = code


def check_fields(body: dict[str, Any], supported: set[str], model: str) -> None:
    """Raise ApiError for another model, a field that is not supported, or a value out of its range."""
    if body.get("model", model) != model:
        raise ApiError(404, f"there is no model {body['model']!r} here, only {model!r}", "model_not_found")
    for name, value in body.items():
        known = name in supported | COMMON_FIELDS | FIELDS_WITHOUT_EFFECT
        if not known and value and value != NO_OP_VALUES.get(name):
            raise ApiError(400, f"{name} is not supported", "unsupported_parameter")

    def number(value: Any, kind: Any = (int, float)) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)

    def strings(value: Any) -> bool:
        found = isinstance(value, list) and len(value) <= MAX_STOPS
        return found and all(isinstance(item, str) and 0 < len(item) <= MAX_STOP_CHARACTERS for item in value)

    rules = {
        **dict.fromkeys(LENGTH_FIELDS, ("a positive integer", lambda value: number(value, int) and value > 0)),
        "temperature": (str(TEMPERATURE), lambda value: value in TEMPERATURE),
        "top_p": ("a number above 0 and up to 1", lambda value: number(value) and 0 < value <= 1),
        "seed": ("an integer of 64 bits", lambda value: number(value, int) and abs(value) < 2**63),
        "stop": (
            f"a string of 1 to {MAX_STOP_CHARACTERS} characters, or up to {MAX_STOPS} of them",
            lambda value: strings([value]) or strings(value),
        ),
        "stream": ("true or false", lambda value: isinstance(value, bool)),
        "prompt": ("a string", lambda value: isinstance(value, str)),
    }
    for name, (description, allowed) in rules.items():
        if name in body and not allowed(body[name]):
            raise ApiError(400, f"{name} is {description}, found {body[name]!r:.100}")


@dataclass
class Answer:
    """One answer on its way. Each endpoint has a subclass: how its prompt is read and its answer is written."""

    id: str
    model: str
    prompt: Tensor  # token ids, [1, length]
    body: dict[str, Any]  # the request
    new_tokens: int = 0
    finish_reason: str = "length"
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stops(self) -> list[str]:
        """Strings before which the text ends."""
        stop = self.body.get("stop", [])
        return [stop] if isinstance(stop, str) else stop


class Completion(Answer):
    """/v1/completions: a text continued."""

    fields = {"prompt", "max_tokens", "stop"}
    kinds = ("text_completion", "text_completion")  # in one piece, and streamed
    opening: dict[str, Any] = {"text": ""}

    @staticmethod
    def encode(body: dict[str, Any], tokenizer: Any) -> Tensor:
        """Return the token ids of the prompt in a request, [1, length]."""
        return encode_prompt(tokenizer, body.get("prompt"))

    def whole(self, text: str) -> dict[str, Any]:
        """Return the answer in one piece."""
        return self._body(self._content(text), last=True)

    async def events(self, texts: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""
        yield _event(self._body(self.opening, streamed=True))
        try:
            async for text in texts:
                yield _event(self._body(self._content(text, streamed=True), streamed=True))
            yield _event(self._body(self._content("", streamed=True), streamed=True, last=True))
        except ApiError as error:
            yield _event({"error": error.detail})
        yield "data: [DONE]\n\n"

    def _content(self, text: str, streamed: bool = False) -> dict[str, Any]:
        return {"text": text}

    def _body(self, content: dict[str, Any], streamed: bool = False, last: bool = False) -> dict[str, Any]:
        prompt, new = self.prompt.shape[1], self.new_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self.finish_reason if last else None}
        about = {"id": self.id, "object": self.kinds[streamed], "created": self.created, "model": self.model}
        return {**about, "choices": [choice], **({"usage": usage} if last else {})}


class ChatCompletion(Completion):
    """/v1/chat/completions: a conversation continued."""

    fields = {"messages", "chat_template_kwargs", "max_completion_tokens", "max_tokens", "stop"}
    kinds = ("chat.completion", "chat.completion.chunk")
    opening = {"delta": {"role": "assistant", "content": ""}}

    @staticmethod
    def encode(body: dict[str, Any], tokenizer: Any) -> Tensor:
        return _encode_messages(body["messages"], tokenizer, body.get("chat_template_kwargs", {}))

    def _content(self, text: str, streamed: bool = False) -> dict[str, Any]:
        return {"delta": {"content": text}} if streamed else {"message": {"role": "assistant", "content": text}}


class Response(Answer):
    """/v1/responses: a text or a conversation continued."""

    fields = {"input", "instructions", "max_output_tokens"}

    @staticmethod
    def encode(body: dict[str, Any], tokenizer: Any) -> Tensor:
        """Return the token ids of the prompt in a request, [1, length]."""
        items = body["input"]
        if not isinstance(items, str | list):
            raise ApiError(422, f"input must be a string or a list, found {items!r:.100}")
        if isinstance(items, str) or (items and "role" not in items[0]):  # one message, or the parts of one
            items = [{"role": "user", "content": items}]
        if body.get("instructions"):
            has_system = bool(items) and items[0]["role"] == "system"
            items = [{"role": "system", "content": body["instructions"]}, *items[has_system:]]
        return _encode_messages(items, tokenizer, {})

    def whole(self, text: str) -> dict[str, Any]:
        """Return the answer in one piece."""
        prompt, new = self.prompt.shape[1], self.new_tokens
        usage = {
            "input_tokens": prompt,
            "output_tokens": new,
            "total_tokens": prompt + new,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return self._body("completed", output=[self._message("completed", text)], usage=usage)

    async def events(self, texts: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""
        numbers, whole = count(), ""
        place = {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> str:
            return _event({"type": kind, "sequence_number": next(numbers), **fields})

        yield event("response.created", response=self._body("queued"))
        yield event("response.in_progress", response=self._body("in_progress"))
        yield event("response.output_item.added", output_index=0, item=self._message("in_progress"))
        yield event("response.content_part.added", **place, part=_part(""))
        try:
            async for text in texts:
                whole += text
                yield event("response.output_text.delta", **place, delta=text, logprobs=[])
        except ApiError as error:
            failure = {"code": "server_error", "message": error.detail}
            yield event("error", message=error.detail)
            yield event("response.failed", response=self._body("failed", error=failure))
            return
        yield event("response.output_text.done", **place, text=whole, logprobs=[])
        yield event("response.content_part.done", **place, part=_part(whole))
        yield event("response.output_item.done", output_index=0, item=self._message("completed", whole))
        yield event("response.completed", response=self.whole(whole))

    def _body(self, status: str, **fields: Any) -> dict[str, Any]:
        about = {"id": f"resp_{self.id}", "object": "response", "created_at": self.created, "model": self.model}
        tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
        return {**about, "status": status, "output": [], **tools, **fields}

    def _message(self, status: str, *texts: str) -> dict[str, Any]:
        about = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status}
        return {**about, "content": [_part(text) for text in texts]}


ENDPOINTS: dict[str, type[Completion | Response]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/responses": Response,
}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _encode_messages(messages: list[dict[str, Any]], tokenizer: Any, options: dict[str, Any]) -> Tensor:
    """Return the token ids of a conversation, [1, length]; `options` are the chat template's.

    Raises:
        ApiError: the model has no chat template, or a message has more than text.
    """
    if "chat_template" in options:  # a program, which could run forever
        raise ApiError(400, "chat_template is not supported, only the model's own", "unsupported_parameter")
    if not tokenizer.chat_template:
        raise ApiError(400, "this model has no chat template, it continues text: use /v1/completions")
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        other = {part["type"] for part in parts} - {"text", "input_text", "output_text"}
        if other or message.get("tool_calls"):
            raise ApiError(400, f"{min(other, default='tool_calls')} is not supported", "unsupported_parameter")
        texts.append({"role": message["role"], "content": " ".join(part["text"] for part in parts)})
    fixed = {"add_generation_prompt": True, "tokenize": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(texts, **options, **fixed)["input_ids"]
