"""An OpenAI-compatible server for one model.

The event loop reads requests and writes answers; one thread generates them, one after the other. Every field of a
request is used, is known not to change the text, or is refused.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from tokenizers.decoders import DecodeStream
from torch import Tensor

from ..checkpoints.open import load_model, open_causal_lm
from ..compat import quiet_transformers
from ..data.prepare import fitting_tokenizer
from ..errors import LeanError
from . import Decoder
from .openai_api import ENDPOINTS, LENGTH_FIELDS, Answer, ApiError, Completion, Response, check_fields

DEFAULT_NEW_TOKENS = 1024
MAX_BODY_BYTES = 8 * 2**20
POLL_SECONDS = 0.1  # between two looks for a disconnected client
SHUTDOWN_SECONDS = 3  # for clients that are slow to read the rest of an answer
# Settings of a generation_config.json that would change the text, and that Decoder does not have.
UNUSED_SETTINGS = {
    *("repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "bad_words_ids", "suppress_tokens"),
}

logger = logging.getLogger(__name__)


class TextStream:
    """The text of tokens that come one by one, up to the first stop string."""

    def __init__(self, tokenizer: Any, stops: list[str]):
        self.tokens: list[int] = []
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._text, self._sent = "", 0

    def add(self, token: int) -> str:
        """Return what one more token adds to the text, less what may be the beginning of a stop string."""
        self.tokens.append(token)
        self._text += self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
        return self._advance(held=max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD for a character that is cut off."""
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.startswith(self._text):
            self._text = text
        return self._advance(held=0)

    def _overlap(self, stop: str) -> int:
        lengths = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((length for length in lengths if self._text.endswith(stop[:length])), 0)

    def _advance(self, held: int) -> str:
        starts = [start for stop in self._stops if (start := self._text.find(stop, self._sent)) >= 0]
        self.stopped = bool(starts)
        start, self._sent = self._sent, min(starts, default=len(self._text) - held)
        return self._text[start : self._sent]


class Generator:
    """Generates answers one after the other, on one thread."""

    def __init__(self, model: Any, tokenizer: Any):
        self.decoder, self.tokenizer, self.stopping = Decoder(model), tokenizer, False
        self._thread = ThreadPoolExecutor(1, "generate")

    async def texts(self, request: Request, answer: Answer, options: dict[str, Any]) -> AsyncIterator[str]:
        """Yield an answer's text in pieces, until it ends or the client disconnects; `options` are those of Decoder.

        Raises:
            ApiError: generation failed, or the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue = asyncio.Queue()

        def put(new: Tensor) -> bool:
            if not answer.cancelled.is_set():
                loop.call_soon_threadsafe(tokens.put_nowait, int(new))
            return answer.cancelled.is_set()

        generated = loop.run_in_executor(self._thread, self._generate, answer, options, put)
        generated.add_done_callback(lambda _: tokens.put_nowait(None))
        text, ended = TextStream(self.tokenizer, answer.stops), False
        try:
            while not ended and not await request.is_disconnected():
                if self.stopping:
                    raise ApiError(503, "the server was ended")
                try:
                    token = await asyncio.wait_for(tokens.get(), POLL_SECONDS)
                except TimeoutError:
                    continue
                if token is None and (error := generated.exception()):
                    logger.error("an answer could not be generated", exc_info=error)
                    raise ApiError(500, str(error) or type(error).__name__)
                piece = text.finish() if token is None else text.add(token)
                answer.new_tokens, ended = len(text.tokens), token is None or text.stopped
                if text.stopped or (token is None and generated.result()):
                    answer.finish_reason = "stop"
                if piece:
                    yield piece
        finally:
            answer.cancelled.set()

    def _generate(self, answer: Answer, options: dict[str, Any], callback: Callable[[Tensor], bool]) -> bool:
        """Return whether the answer ended by itself, not by its length."""
        if answer.cancelled.is_set():
            return False
        # The random generator is global: it is seeded on the one thread that draws from it.
        seed = answer.body.get("seed")
        torch.seed() if seed is None else torch.manual_seed(seed)
        try:
            tokens = self.decoder.generate(answer.prompt.to(self.decoder.model.device), callback=callback, **options)
        finally:
            self.decoder.cache = None
        ends = self.decoder.generation_config.eos_token_id
        return int(tokens[0, -1]) in ([ends] if isinstance(ends, int) else ends or [])

    def close(self) -> None:
        """Wait for the thread: an interpreter must not end under one in PyTorch."""
        self._thread.shutdown()


async def _read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body, without fields that are null; raise ApiError for anything else there."""
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
        body = json.loads(content)
    except (ValueError, RecursionError, ClientDisconnect) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    # Browsers let a page of any other site send the other types.
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if not isinstance(body, dict) or content_type.strip().lower() != "application/json":
        raise ApiError(400, "the body is not a JSON object, or its Content-Type is not application/json")
    return {name: value for name, value in body.items() if value is not None}


def _decoder_options(body: dict[str, Any], prompt_tokens: int, model: Any) -> dict[str, Any]:
    """Return the options of `Decoder.generate`; what a request leaves open is the model's default.

    Raises:
        ApiError: prompt and answer exceed the positions that the model was trained on.
    """
    positions, defaults = model.config.max_position_embeddings, model.generation_config
    room = positions - prompt_tokens
    new = next((body[name] for name in LENGTH_FIELDS if name in body), min(max(room, 1), DEFAULT_NEW_TOKENS))
    if new > room:
        lengths = f"a prompt of {prompt_tokens} tokens and {new} new ones"
        message = f"the model has {positions} positions, found {lengths}; ask for less"
        raise ApiError(400, message, "context_length_exceeded")
    temperature = body.get("temperature", 1.0 if defaults.temperature is None else defaults.temperature)
    if temperature == 0:
        return {"max_new_tokens": new}
    sampling = {"temperature": float(temperature), "top_p": body.get("top_p", defaults.top_p), "top_k": defaults.top_k}
    return {"max_new_tokens": new, "do_sample": True, **sampling}


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or str(uuid4())


def build_app(model: Any, tokenizer: Any, name: str) -> tuple[FastAPI, Generator]:
    """Return the application and what generates for it.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer, a fast one.
        name: what requests call the model.
    """
    if unused := UNUSED_SETTINGS & model.generation_config.to_diff_dict().keys():
        logger.warning("generation_config.json sets %s, which this server does not apply", ", ".join(sorted(unused)))
    generator, app = Generator(model, tokenizer), FastAPI(openapi_url=None)

    async def respond(request: Request, endpoint: type[Completion | Response]) -> JSONResponse | StreamingResponse:
        body = await _read_object(request)
        check_fields(body, endpoint.fields, name)
        try:
            prompt = endpoint.encode(body, tokenizer)
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ApiError(400, f"the request cannot be read: {type(error).__name__}: {error}") from error
        options = _decoder_options(body, prompt.shape[1], model)
        answer = endpoint(_request_id(request), name, prompt, body)
        texts, headers = generator.texts(request, answer, options), {"x-request-id": answer.id}
        if body.get("stream"):
            return StreamingResponse(answer.events(texts), headers=headers, media_type="text/event-stream")
        return JSONResponse(answer.whole("".join([text async for text in texts])), headers=headers)

    for path, endpoint in ENDPOINTS.items():
        app.add_route(path, partial(respond, endpoint=endpoint), methods=["POST"])

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "leanqkv"}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def error_answer(request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 500)
        kind = "invalid_request_error" if status < 500 else "server_error"
        message = getattr(error, "detail", f"{type(error).__name__}: {error}")
        content = {"message": message, "type": kind, "param": None, "code": getattr(error, "code", None)}
        return JSONResponse({"error": content}, status, {"x-request-id": _request_id(request)})

    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, error_answer)
    return app, generator


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        # The error number of an address without a name is negative, and not the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise LeanError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None


class Server(uvicorn.Server):
    """A server whose shutdown does not wait for answers to be complete, which may take minutes."""

    def __init__(self, app: FastAPI, generator: Generator):
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS)
        super().__init__(config)
        self.generator = generator

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.generator.stopping = True
        await super().shutdown(sockets)


def serve(
    directory: Path,
    *,
    host: str,
    port: int,
    device: str,
    dtype: torch.dtype | None = None,
    started: Callable[[str, str], None] = lambda name, address: None,
) -> None:
    """Serve the model in `directory` under the directory's name, until SIGINT.

    Args:
        port: 0 for any that is free.
        dtype: of the weights; None: as stored.
        started: is called with the model's name and the address when requests can come.

    Raises:
        LeanError: no causal language model or no tokenizer in `directory`; an address that cannot be listened on.
    """
    opened = open_causal_lm(directory)
    tokenizer = fitting_tokenizer(directory, opened.config.vocab_size)
    with _listen(host, port) as listener:  # before the weights, which may take long
        name = directory.resolve().name
        app, generator = build_app(load_model(opened, dtype).to(device), tokenizer, name)
        shown = f"[{host}]" if ":" in host else host
        started(name, f"http://{shown}:{listener.getsockname()[1]}/v1")
        with quiet_transformers():
            try:
                Server(app, generator).run(sockets=[listener])
            except KeyboardInterrupt:  # raised again by uvicorn when all is closed
                pass
            finally:
                generator.close()
