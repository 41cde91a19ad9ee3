"""Prompts as a model reads them, and new tokens as the text behind a prompt."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers import models, pre_tokenizers
from torch import Tensor

from ..checkpoints.tokenizer import check_ids
from ..compat import panics_are_errors
from ..data.corpus import encodable
from ..errors import LeanError

# Of a prompt, to know how the text goes on behind it; more where a character begins before them.
CONTEXT_TOKENS, MAX_CONTEXT_TOKENS = 8, 1024
# Tokens that may make up one character; tokens that make up none are given up after so many.
CHARACTER_TOKENS = 16
TEMPLATE_SECONDS = 10.0  # for a chat template to write one short message
CUT_OFF = "\ufffd"  # how tokenizers write a part of a character
# At most four code points become one in Unicode's normal forms, such as a Greek letter with three accents.
COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}


class TextStream:
    """The text of new tokens that come one by one, as it stands behind their prompt, up to the first stop string.

    Stop strings are searched in the text with special tokens; the text that is returned has none.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        self.stopped = False
        self._backend, self._stops = tokenizer.backend_tokenizer, stops
        self._text, self._shown = "", b""  # not returned yet; which of its characters are no special token's
        count = CONTEXT_TOKENS
        while True:
            self._ids = list(prompt[-count:])
            before = self._decode(self._ids)
            if count >= min(len(prompt), MAX_CONTEXT_TOKENS) or (before and not before.startswith(CUT_OFF)):
                break
            count *= 2
        self._known, self._before = len(self._ids), before.rstrip(CUT_OFF)  # tokens whose text is in _text, and it

    def add(self, token: int) -> str:
        """Return what one more token adds to the text, less what may be the beginning of a stop string."""
        if not self._decode([token]) and self._backend.decode([token], skip_special_tokens=False):
            self._append(self._advance(last=True))
            self._append(self._backend.id_to_token(token), shown=False)
        else:
            self._ids.append(token)
            self._append(self._advance())
        return self._take(held=max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD for a character that is cut off."""
        self._append(self._advance(last=True))
        return self._take(held=0)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=True)

    def _advance(self, last: bool = False) -> str:
        """Return the text of the newest tokens, if they end with a whole character or are the `last` ones."""
        text, new = self._decode(self._ids), self._ids[self._known :]
        waits = text.endswith(CUT_OFF) or len(text) <= len(self._before)
        if not new or (waits and not last and len(new) < CHARACTER_TOKENS):
            return ""
        # Bytes that are no text can change how the bytes before them are written; alone they cannot.
        text = text[len(self._before) :] if text.startswith(self._before) else self._decode(new)
        self._ids, self._known, self._before = new, len(new), self._decode(new)
        return text

    def _append(self, text: str, shown: bool = True) -> None:
        self._text += text
        self._shown += bytes([shown]) * len(text)

    def _overlap(self, stop: str) -> int:
        lengths = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((length for length in lengths if self._text.endswith(stop[:length])), 0)

    def _take(self, held: int) -> str:
        starts = [start for stop in self._stops if (start := self._text.find(stop)) >= 0]
        self.stopped = bool(starts)
        end = min(starts, default=len(self._text) - held)
        text = "".join(compress(self._text[:end], self._shown))
        self._text, self._shown = self._text[end:], self._shown[end:]
        return text


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of one token as it is between others: alone, a word may lose the space before it."""
    once, twice = (tokenizer.backend_tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice[len(once) :]


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: those of the generation config and the tokenizer's own."""
    ends = generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return list(dict.fromkeys([*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))


def render_chat(tokenizer: Any, messages: list[dict[str, str]], variables: dict[str, Any] | None = None) -> str:
    """Return a conversation in the model's chat template, which writes special tokens itself.

    Args:
        variables: more of them for the template.

    Raises:
        LeanError: there is no template, it cannot be applied, or the result is no text in UTF-8.
    """
    if not tokenizer.chat_template:
        raise LeanError("the model has no chat template, it continues text")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(variables or {}))
    except Exception as error:  # A template is a program, and can fail in any way.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise LeanError(f"the model's chat template cannot be applied: {reason:.300}") from error
    return encodable(text, "the conversation")


def encode_chat(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a conversation in its template, [1, length]; those around texts are in the template."""
    with panics_are_errors("the conversation"):
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=torch.long)


def check_chat_template(tokenizer: Any) -> None:
    """Refuse a chat template that cannot be applied to any conversation.

    Raises:
        LeanError: it has a syntax error, uses something undefined, or something that its sandbox forbids, or it takes
            longer than TEMPLATE_SECONDS.
    """
    try:
        if tokenizer.chat_template:
            with _time_limit(TEMPLATE_SECONDS):
                render_chat(tokenizer, [{"role": "user", "content": "a"}])
    except LeanError as error:
        # A TemplateError itself is the template's own refusal of this conversation.
        if isinstance(error.__cause__, TemplateError | TimeoutError) and type(error.__cause__) is not TemplateError:
            raise


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in the body after so many seconds, where the system and the thread allow it."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} seconds for one short message")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_tokens(tokens: Sequence[int], vocab_size: int, tokenizer: Any) -> None:
    """Refuse a prompt that the model cannot read.

    Raises:
        LeanError: it is empty, or has a token that the model has no embedding for.
    """
    if not len(tokens):
        raise LeanError("the prompt is empty; give at least one token")
    check_ids(list(tokens), vocab_size, tokenizer, "the prompt")


def longest_token(tokenizer: Any) -> int | None:
    """Return the most characters of a text that one token can stand for; None: any number, or not known."""
    backend = tokenizer.backend_tokenizer
    shrinks = [1]
    for part in _parts(backend.normalizer, "normalizers"):
        replaced = part.get("pattern", {}).get("String")
        same = part["type"] == "Replace" and replaced and len(part["content"]) >= len(replaced)
        shrinks.append(1 if same else COMPOSED.get(part["type"], 0))
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    removes = [part for part in splits if part["type"] not in ("ByteLevel", "Split", "Metaspace", "Digits")]
    removes += [part for part in splits if part.get("behavior") == "Removed"]
    model, tokens = backend.model, backend.get_vocab()
    whole = isinstance(model, models.BPE) and (
        all(f"<0x{byte:02X}>" in tokens for byte in range(256))
        if model.byte_fallback
        else set(pre_tokenizers.ByteLevel.alphabet()) <= tokens.keys() and "ByteLevel" in str(splits)
    )
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if not whole or not all(shrinks) or removes or strips:
        return None
    return max(map(len, tokens)) * max(shrinks)


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Return what a normalizer or pre-tokenizer consists of, as tokenizer.json has it."""
    data: dict[str, Any] = {"type": "Sequence", name: []}
    if component is not None:
        data = json.loads(component.__getstate__())
    return data[name] if data["type"] == "Sequence" else [data]
