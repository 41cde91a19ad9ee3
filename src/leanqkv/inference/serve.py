"""An OpenAI-compatible server for one model.

The event loop reads requests and writes answers, one thread tokenizes prompts, and one generates answers, all of them
together. Every field of a request is used, is known not to change the text, or is refused.
"""

import asyncio
import gc
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import h11
import psutil
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers.decoders import DecodeStream
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checkpoints.memory import give_back_freed_memory
from ..checkpoints.open import load_model, open_causal_lm
from ..checkpoints.tokenizer import load_tokenizer
from ..compat import quiet_transformers
from ..errors import LeanError
from . import Decoder
from .batch import Row, Scheduler
from .openai_api import ENDPOINTS, LENGTH_FIELDS, Answer, ApiError, Completion, Response, check_fields

DEFAULT_NEW_TOKENS = 1024
# Of a body: JSON is parsed in one go, and nothing else runs meanwhile (512 KiB take up to 60 milliseconds).
MAX_BODY_BYTES, BODY_BYTES_PER_POSITION, BODY_BYTES_BESIDE = 2**19, 16, 2**16
MAX_REQUESTS = 256
RETRY_SECONDS = 10
REQUEST_SECONDS = 20  # for a client to send a request, headers and body
SHUTDOWN_SECONDS = 3  # for clients that are slow to read the rest of an answer
# Settings of a generation_config.json that would change the text, and that Decoder does not have.
UNUSED_SETTINGS = {
    *("repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "bad_words_ids", "suppress_tokens"),
}

DISCONNECTED, STOPPED = "the client disconnected", "the server was ended"

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
    """Generates all answers together, on one thread."""

    def __init__(self, model: Any, tokenizer: Any):
        self.decoder, self.tokenizer, self.stopping = Decoder(model), tokenizer, False
        self.scheduler = Scheduler(self.decoder, _cache_tokens(model))
        self.reader = ThreadPoolExecutor(1, "tokenize")
        self._thread = ThreadPoolExecutor(1, "generate")
        self._driver: asyncio.Task | None = None
        self._events: dict[Row, asyncio.Queue] = {}

    async def texts(self, answer: Answer, row: Row) -> AsyncIterator[str]:
        """Yield an answer's text in pieces, until it ends; when this is closed, its row is dropped.

        Raises:
            ApiError: generation failed, or the server is shutting down.
        """
        events = self._events[row] = asyncio.Queue()
        text, ended = TextStream(self.tokenizer, answer.stops), False
        try:
            if self.stopping:
                raise ApiError(503, STOPPED)
            self.scheduler.waiting.append(row)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
            while not ended:
                token = await events.get()
                if isinstance(token, ApiError):
                    raise token
                piece = text.finish() if token is None else text.add(token)
                answer.new_tokens, ended = len(text.tokens), token is None or text.stopped
                if text.stopped or (token is None and row.ended):
                    answer.finish_reason = "stop"
                if piece:
                    yield piece
        finally:
            row.cancelled = True
            del self._events[row]

    async def _drive(self) -> None:
        """Generate while there are rows; between two steps the answers' tasks take what the step gave them."""
        loop = asyncio.get_running_loop()
        while self.scheduler.busy:
            try:
                events = await loop.run_in_executor(self._thread, self.scheduler.advance)
            except Exception as error:
                events = [(row, error) for row in self.scheduler.rows]
                self.scheduler.drop()
            for row, event in events:
                if isinstance(event, Exception):
                    logger.error("an answer could not be generated", exc_info=event)
                    event = ApiError(500, str(event) or type(event).__name__)
                self._put(row, event)

    def _put(self, row: Row, event: int | ApiError | None) -> None:
        if row in self._events:
            self._events[row].put_nowait(event)

    def stop(self) -> None:
        """End all answers with an error."""
        self.stopping = True
        for row in self._events:
            row.cancelled = True
            self._put(row, ApiError(503, STOPPED))

    def close(self) -> None:
        """Wait for the threads: an interpreter must not end under one in PyTorch."""
        for thread in (self.reader, self._thread):
            thread.shutdown(cancel_futures=True)


def _cache_tokens(model: Any) -> int:
    """Return how many tokens the cache may hold: with padding, and twice while it grows, in half of the free memory."""
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    return free // 8 // max(1, model.config.plan.kv_bytes_per_token(model.dtype))


async def _unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of `work`, which is cancelled when the client disconnects; the body must have been read."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(400, DISCONNECTED)
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _read_body(request: Request, limit: int) -> bytes:
    content, length = bytearray(), 0
    try:
        async for chunk in request.stream():
            length += len(chunk)
            # The rest is read as well: many clients take no answer before they have sent everything.
            if length <= limit:
                content += chunk
    except ClientDisconnect as error:
        raise ApiError(400, DISCONNECTED) from error
    if length > limit:
        raise ApiError(413, f"the body is larger than {limit:,} bytes; send less")
    return bytes(content)


def _read_object(request: Request, content: bytes) -> dict[str, Any]:
    """Return the JSON object in the body, without fields that are null; raise ApiError for anything else there."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    # Browsers let a page of any other site send the other types.
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if not isinstance(body, dict) or content_type.strip().lower() != "application/json":
        raise ApiError(400, "the body is not a JSON object, or its Content-Type is not application/json")
    return {name: value for name, value in body.items() if value is not None}


def _row(body: dict[str, Any], prompt: Tensor, decoder: Decoder) -> Row:
    """Return what is to be generated; what a request leaves open is the model's default.

    Raises:
        ApiError: prompt and answer exceed the positions that the model was trained on.
    """
    config, defaults = decoder.config, decoder.generation_config
    positions = min(config.max_position_embeddings, config.cached_positions or config.max_position_embeddings)
    room = positions - len(prompt)
    new = next((body[name] for name in LENGTH_FIELDS if name in body), min(max(room, 1), DEFAULT_NEW_TOKENS))
    if new > room:
        lengths = f"a prompt of {len(prompt)} tokens and {new} new ones"
        message = f"the model has {positions} positions, found {lengths}; ask for less"
        raise ApiError(400, message, "context_length_exceeded")
    temperature = body.get("temperature", 1.0 if defaults.temperature is None else defaults.temperature)
    if temperature == 0:
        return Row(prompt, new)
    generator = torch.Generator(decoder.model.device)
    generator.seed() if "seed" not in body else generator.manual_seed(body["seed"])
    warpers = decoder.warpers(float(temperature), defaults.top_k, body.get("top_p", defaults.top_p))
    return Row(prompt, new, warpers, generator)


class RequestLimit:
    """Middleware that refuses requests while all of `slots` are taken, by open requests in whatever state."""

    def __init__(self, app: ASGIApp, slots: asyncio.Semaphore):
        self._app, self._slots = app, slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._slots.locked():
            message = f"{MAX_REQUESTS} requests are worked on or wait; try again later"
            raise ApiError(429, message, "rate_limit_exceeded", {"Retry-After": str(RETRY_SECONDS)})
        async with self._slots:
            await self._app(scope, receive, send)


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or str(uuid4())


async def _error_answer(request: Request, error: Exception) -> JSONResponse:
    status = getattr(error, "status_code", 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = getattr(error, "detail", f"{type(error).__name__}: {error}")
    content = {"message": message, "type": kind, "param": None, "code": getattr(error, "code", None)}
    headers = {"x-request-id": _request_id(request), **(getattr(error, "headers", None) or {})}
    return JSONResponse({"error": content}, status, headers)


def build_app(model: Any, tokenizer: Any, name: str) -> tuple[FastAPI, Generator]:
    """Return the application and what generates for it.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer, a fast one.
        name: what requests call the model.
    """
    if unused := UNUSED_SETTINGS & model.generation_config.to_diff_dict().keys():
        logger.warning("generation_config.json sets %s, which this server does not apply", ", ".join(sorted(unused)))
    generator = Generator(model, tokenizer)
    limit = min(BODY_BYTES_BESIDE + BODY_BYTES_PER_POSITION * model.config.max_position_embeddings, MAX_BODY_BYTES)
    slots = Middleware(RequestLimit, slots=asyncio.Semaphore(MAX_REQUESTS))

    def read(request: Request, content: bytes, endpoint: type[Completion | Response]) -> tuple[Answer, Row]:
        body = _read_object(request, content)
        check_fields(body, endpoint.fields, name)
        try:
            prompt = endpoint.encode(body, tokenizer)
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ApiError(400, f"the request cannot be read: {type(error).__name__}: {error}") from error
        return endpoint(_request_id(request), name, prompt, body), _row(body, prompt[0], generator.decoder)

    async def respond(request: Request, endpoint: type[Completion | Response]) -> JSONResponse | StreamingResponse:
        content = await _read_body(request, limit)
        reading = asyncio.get_running_loop().run_in_executor(generator.reader, read, request, content, endpoint)
        answer, row = await _unless_disconnected(request, reading)
        texts, headers = generator.texts(answer, row), {"x-request-id": answer.id}
        if answer.body.get("stream"):
            return StreamingResponse(answer.events(texts), headers=headers, media_type="text/event-stream")

        async def whole() -> str:
            return "".join([text async for text in texts])

        return JSONResponse(answer.whole(await _unless_disconnected(request, whole())), headers=headers)

    routes = [
        Route(path, partial(respond, endpoint=endpoint), methods=["POST"], middleware=[slots])
        for path, endpoint in ENDPOINTS.items()
    ]
    app = FastAPI(openapi_url=None, routes=routes)  # type: ignore[arg-type]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "leanqkv"}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _error_answer)
    return app, generator


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        # The error number of an address without a name is negative, and not the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise LeanError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None


class TimedProtocol(H11Protocol):
    """HTTP that ends a connection whose client takes more than REQUEST_SECONDS for a request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel()

    def _await_request(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._expire)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        # Nothing can be said to who is being answered already, nor to who has sent nothing.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and self.conn.their_state is not h11.ERROR:
            headers = [("connection", "close"), ("content-length", "0")]
            response = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            self.transport.write(self.conn.send(response))
        self.transport.close()


class Server(uvicorn.Server):
    """A server whose shutdown does not wait for answers to be complete, which may take minutes."""

    def __init__(self, app: FastAPI, generator: Generator):
        options: Any = {"log_level": "warning", "access_log": False, "http": TimedProtocol}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=SHUTDOWN_SECONDS, **options))
        self.generator = generator

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.generator.stop()
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
    tokenizer = load_tokenizer(directory)
    with _listen(host, port) as listener:  # before the weights, which may take long
        name = directory.resolve().name
        app, generator = build_app(load_model(opened, dtype).to(device), tokenizer, name)
        shown = f"[{host}]" if ":" in host else host
        started(name, f"http://{shown}:{listener.getsockname()[1]}/v1")
        gc.freeze()  # so that a collection looks at requests alone, and is short
        give_back_freed_memory()
        with quiet_transformers():
            try:
                Server(app, generator).run(sockets=[listener])
            except KeyboardInterrupt:  # raised again by uvicorn when all is closed
                pass
            finally:
                generator.close()
