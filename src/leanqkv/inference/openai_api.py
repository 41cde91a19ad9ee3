"""OpenAI's API: the prompts in a request, and the form of its answer."""

import asyncio
import inspect
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..data.tokenizer import encode_prompt
from ..model.config import LeanConfig
from .api_fields import CHAT_FIELDS, COMPLETION_FIELDS, ApiError, Rule, error_body, unsupported
from .batch import Row, Score
from .text import TextStream, check_tokens, encode_chat, longest_token, render_chat, token_text

MAX_SCORES = 2**20  # of a request: answers times tokens times logarithms
ROLES = ("system", "developer", "user", "assistant")
# A logarithm that JSON has no number for is told as this one.
LEAST_LOGPROB = -9999.0


def check_scores(rows: list[Row]) -> None:
    """Raise ApiError for more logarithms of probabilities than the memory should hold."""
    found = 0
    for row in rows:
        if row.top is not None:
            found += (row.max_new_tokens + row.reads_scores * len(row.prompt)) * (row.top + 1)
    if found > MAX_SCORES:
        message = f"a request has up to {MAX_SCORES} logprobs, found {found}; ask for fewer answers, tokens or logprobs"
        raise ApiError(400, message, param="logprobs")


class PromptReader:
    """Makes token ids, [length], of the prompts in requests; raises ApiError for those that the model cannot read."""

    def __init__(self, tokenizer: Any, config: LeanConfig):
        self.tokenizer, self._config = tokenizer, config
        longest = longest_token(tokenizer)
        self._characters = math.inf if longest is None else longest * config.max_position_embeddings

    def text(self, text: str) -> Tensor:
        """Return the tokens of a text to be continued."""
        return self._encoded(encode_prompt, text)

    def tokens(self, tokens: Sequence[int]) -> Tensor:
        """Return tokens as they are."""
        return self._checked(torch.tensor(tokens, dtype=torch.long))

    def chat(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> Tensor:
        """Return the tokens of a conversation to be continued; `variables` are the chat template's."""
        if not self.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template, it continues text: use /v1/completions")
        return self._encoded(encode_chat, render_chat(self.tokenizer, messages, variables))

    def _encoded(self, encode: Callable[[Any, str], Tensor], text: str) -> Tensor:
        # A text that is too long whatever its tokens are: to find them takes long.
        if len(text) > self._characters:
            positions = self._config.max_position_embeddings
            message = f"a prompt of {len(text)} characters does not fit the model's {positions} positions; ask for less"
            raise ApiError(400, message, "context_length_exceeded")
        return self._checked(encode(self.tokenizer, text)[0])

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
        piece = self.echo
        if token not in self.row.ends:  # such a token has no text, even if it is no special one
            piece += self.text.finish() if token is None else self.text.add(token)
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
class Completion:
    """/v1/completions: the answer to a request on its way, texts continued."""

    id: str
    model: str
    body: dict[str, Any]  # the request
    tokenizer: Any
    prompts: list[Tensor]  # token ids, [length] each
    choices: list[Choice] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    fields: ClassVar[Mapping[str, Rule]] = COMPLETION_FIELDS
    kinds: ClassVar = ("text_completion", "text_completion")  # in one piece, and streamed
    opening: ClassVar[dict[str, Any]] = {"text": ""}

    @staticmethod
    def encode(body: dict[str, Any], reader: PromptReader) -> list[Tensor]:
        """Return the token ids of the prompts in a request."""
        return [reader.text(one) if isinstance(one, str) else reader.tokens(one) for one in _prompts(body)]

    @staticmethod
    def echoes(body: dict[str, Any], tokenizer: Any) -> list[str]:
        """Return what stands before the answers to each prompt."""
        if not body.get("echo"):
            return [""] * len(_prompts(body))
        decode = tokenizer.backend_tokenizer.decode
        return [one if isinstance(one, str) else decode(one, skip_special_tokens=False) for one in _prompts(body)]

    @staticmethod
    def top_logprobs(body: dict[str, Any]) -> int | None:
        """Return for how many tokens of every position a logarithm of their probability is asked; None: for none."""
        logprobs = body.get("logprobs", False)
        return None if logprobs is False else logprobs

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """Return the answer in one piece."""
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
        """Yield the answer as server-sent events."""
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
        prompt, new = sum(map(len, self.prompts)), sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _body(self, choices: list[dict[str, Any]], streamed: bool = False) -> dict[str, Any]:
        about = {"id": self.id, "object": self.kinds[streamed], "created": self.created, "model": self.model}
        return {**about, "choices": choices}


class ChatCompletion(Completion):
    """/v1/chat/completions: a conversation continued."""

    fields = CHAT_FIELDS
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


ENDPOINTS = {"/v1/completions": Completion, "/v1/chat/completions": ChatCompletion}


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB


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
        raise unsupported(f"chat_template_kwargs.{taken[0]}")
    return reader.chat([_read_message(message) for message in messages], variables)


def _read_message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"a message is an object with role and content, found {message!r:.100}", param="messages")
    role, content = message.get("role"), message.get("content") or ""
    if role not in ROLES:
        raise ApiError(
            400, f"the role of a message is one of {', '.join(ROLES)}, found {role!r:.100}", param="messages"
        )
    named = {"name": name} if isinstance(name := message.get("name"), str) and name else {}
    for unknown, value in message.items():
        if value and unknown not in ("role", "content", *named):
            raise unsupported(unknown)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ApiError(400, f"content is a string or a list of parts, found {content!r:.100}", param="messages")
    for part in parts:
        if part.get("type") != "text":
            raise unsupported(f"{part.get('type')}")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"the text of a part is a string, found {part.get('text')!r:.100}", param="messages")
    # OpenAI's newer name for the system's messages, which templates do not know.
    role = "system" if role == "developer" else role
    return {"role": role, "content": " ".join(part["text"] for part in parts), **named}
