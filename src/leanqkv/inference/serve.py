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
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ..cache_bits import PLAIN, CacheBits
from ..checkpoints.open import load_model, open_causal_lm
from ..checkpoints.tokenizer import load_tokenizer
from ..compat import quiet_transformers
from ..environment import free_memory, give_back_freed_memory
from ..errors import LeanError
from . import Decoder
from .api_fields import ApiError, check_model, checked_fields, error_body
from .batch import Row, Scheduler
from .connections import Connection, most_connections
from .decoder import CountPenalty, last_position, logits_warpers, position_limit
from .openai_api import ENDPOINTS, Choice, Completion, Pieces, PromptReader, check_scores
from .text import TextStream, check_chat_template, end_tokens

DEFAULT_NEW_TOKENS = 1024
# Of a body: JSON is parsed in one go, and nothing else runs meanwhile (512 KiB take up to 60 milliseconds).
MAX_BODY_BYTES, BODY_BYTES_PER_POSITION, BODY_BYTES_BESIDE = 2**19, 16, 2**16
DROPPED_BODY_BYTES = 2**24  # beyond a body's limit, before the connection is closed
MAX_REQUESTS, MAX_ANSWERS = 256, 256  # of the server; of a request
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens")
RETRY_SECONDS = 10
SHUTDOWN_SECONDS = 3  # for clients that are slow to read the rest of an answer
# Settings of a generation_config.json that would change the text, and that Decoder does not have.
UNUSED_SETTINGS = {"no_repeat_ngram_size", "typical_p", "bad_words_ids", "suppress_tokens", "sequence_bias"}

DISCONNECTED, STOPPED = "the client disconnected", "the server was ended"

logger = logging.getLogger(__name__)


class Generator:
    """Generates all answers together, on one thread."""

    def __init__(self, model: Any, tokenizer: Any, bits: CacheBits = PLAIN):
        self.decoder, self.stopping = Decoder(model, cache_bits=bits), False
        self.prompts = PromptReader(tokenizer, model.config)
        self.scheduler = Scheduler(self.decoder, _cache_tokens(model, bits))
        self.reader = ThreadPoolExecutor(1, "tokenize")
        self._thread = ThreadPoolExecutor(1, "generate")
        self._driver: asyncio.Task | None = None
        self._events: dict[Row, tuple[Choice, asyncio.Queue]] = {}

    async def pieces(self, choices: list[Choice]) -> Pieces:
        """Yield what is added to each answer, until all have ended; when this is closed, their rows are dropped.

        Raises:
            ApiError: generation failed, or the server is shutting down.
        """
        events: asyncio.Queue = asyncio.Queue()
        running = len(choices)
        try:
            if self.stopping:
                raise ApiError(503, STOPPED)
            self._events |= {choice.row: (choice, events) for choice in choices}
            self.scheduler.waiting.extend(choice.row for choice in choices)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
            while running:
                choice, token = await events.get()
                if isinstance(token, ApiError):
                    raise token
                if choice.ended:
                    continue
                text, scores = choice.take(token)
                if choice.ended:
                    choice.row.cancelled = True
                    running -= 1
                if text or scores or choice.ended:
                    yield choice, text, scores
        finally:
            for choice in choices:
                choice.row.cancelled = True
                self._events.pop(choice.row, None)

    async def _drive(self) -> None:
        """Generate while there are rows; between two steps the answers' tasks take what the step gave them."""
        loop = asyncio.get_running_loop()
        while self.scheduler.busy:
            try:
                events = await loop.run_in_executor(self._thread, self.scheduler.advance)
            except Exception as error:
                events = [(row, error) for row in self._events]
                self.scheduler.drop()
            for row, event in events:
                if isinstance(event, Exception):
                    logger.error("an answer could not be generated", exc_info=event)
                    event = ApiError(500, str(event) or type(event).__name__)
                self._put(row, event)

    def _put(self, row: Row, event: int | ApiError | None) -> None:
        if row in self._events:
            choice, events = self._events[row]
            events.put_nowait((choice, event))

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


def _cache_tokens(model: Any, bits: CacheBits) -> int:
    """Return how many tokens the cache may hold: with padding, and twice while it grows, in half of the free memory."""
    return int(free_memory(model.device.type) // 8 // max(1, bits.bytes_per_token(model.config.plan, model.dtype)))


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
            # Some more is read and dropped: many clients take no answer before they have sent everything.
            if length > limit + DROPPED_BODY_BYTES:
                break
            if length <= limit:
                content += chunk
    except ClientDisconnect as error:
        raise ApiError(400, DISCONNECTED) from error
    if length > limit:
        headers = {"Connection": "close"}
        raise ApiError(413, f"the body is larger than {limit:,} bytes; send less", headers=headers)
    return bytes(content)


def _read_object(request: Request, content: bytes) -> dict[str, Any]:
    """Return the JSON object in the body, without fields that are null; raise ApiError for anything else there."""
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair, which is no character; leave it out") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    # Browsers let a page of any other site send the other types.
    content_type = request.headers.get("content-type", "").partition(";")[0]
    if not isinstance(body, dict) or content_type.strip().lower() != "application/json":
        raise ApiError(400, "the body is not a JSON object, or its Content-Type is not application/json")
    return {name: value for name, value in body.items() if value is not None}


def _read_answer(
    generator: Generator, model: str, request: Request, content: bytes, endpoint: type[Completion]
) -> Completion:
    """Return the answer that a request asks for, of which nothing is generated yet; raise ApiError for one refused."""
    body = checked_fields(_read_object(request, content), endpoint.fields, model)
    tokenizer = generator.prompts.tokenizer
    try:
        prompts = endpoint.encode(body, generator.prompts)
    except (LeanError, LookupError, TypeError, ValueError, AttributeError) as error:
        kind = "" if isinstance(error, LeanError) else f"{type(error).__name__}: "
        raise ApiError(400, f"the request cannot be read: {kind}{error}") from error
    if len(prompts) * body.get("n", 1) > MAX_ANSWERS:
        raise ApiError(400, f"a request has up to {MAX_ANSWERS} answers, found {len(prompts)} prompts", param="n")
    stops, ends = body.get("stop", []), end_tokens(generator.decoder.generation_config, tokenizer)
    answer = endpoint(_request_id(request), model, body, tokenizer, prompts)
    for prompt, echo in zip(prompts, endpoint.echoes(body, tokenizer), strict=True):
        for row in _rows(body, prompt, generator.decoder, ends, endpoint.top_logprobs(body)):
            text = TextStream(tokenizer, prompt.tolist(), [stops] if isinstance(stops, str) else stops)
            answer.choices.append(Choice(len(answer.choices), row, text, echo))
    check_scores([choice.row for choice in answer.choices])
    return answer


def _rows(body: dict[str, Any], prompt: Tensor, decoder: Decoder, ends: list[int], top: int | None) -> list[Row]:
    """Return what is to be generated behind a prompt; what a request leaves open is the model's default.

    Raises:
        ApiError: prompt and answer exceed the positions that the model was trained on.
    """
    config, defaults, length = decoder.config, decoder.generation_config, len(prompt)
    reach = last_position(config, length)
    positions = min(config.max_position_embeddings, reach or config.max_position_embeddings)
    room = positions - length
    new = next((body[name] for name in LENGTH_FIELDS if name in body), min(max(room, 1), DEFAULT_NEW_TOKENS))
    if new > room:
        message = f"a prompt of {length} tokens and {new!s:.30} new ones do not fit {position_limit(config, positions)}"
        raise ApiError(400, f"{message}; ask for less", "context_length_exceeded")
    echoed = bool(body.get("echo")) and top is not None
    if echoed and config.mask_type == "prefix":
        raise ApiError(
            400, "this model reads a prompt in both directions, so its tokens have no logprobs", param="echo"
        )
    warpers, needs_tokens = _warpers(body, length, decoder)
    rows = []
    for number in range(body.get("n", 1)):
        sampler = None
        if _temperature(body, defaults):
            sampler = torch.Generator(decoder.model.device)
            sampler.seed() if "seed" not in body else sampler.manual_seed(body["seed"] + number)
        rows.append(Row(prompt, new, warpers, sampler, needs_tokens, ends, top, echoed))
    return rows


def _temperature(body: dict[str, Any], defaults: GenerationConfig) -> float:
    return float(body.get("temperature", 1.0 if defaults.temperature is None else defaults.temperature))


def _warpers(body: dict[str, Any], length: int, decoder: Decoder) -> tuple[LogitsProcessorList, bool]:
    """Return what changes the logits behind a prompt of `length` tokens, and whether it looks at the tokens before."""
    defaults, warpers, needs_tokens = decoder.generation_config, LogitsProcessorList(), False
    if biases := {int(token): float(bias) for token, bias in body.get("logit_bias", {}).items()}:
        if (largest := max(biases)) >= decoder.config.vocab_size:
            message = f"logit_bias has token {largest}, and the model only {decoder.config.vocab_size} tokens"
            raise ApiError(400, message, "invalid_value", param="logit_bias")
        bias_of: Any = {(token,): bias for token, bias in biases.items()}  # transformers 5.17 refuses token 0 in a list
        warpers.append(SequenceBiasLogitsProcessor(bias_of))
    if (penalty := body.get("repetition_penalty", defaults.repetition_penalty)) not in (None, 1):
        warpers.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        needs_tokens = True
    penalties = [body.get(name, 0) for name in ("frequency_penalty", "presence_penalty")]
    if any(penalties):
        warpers.append(CountPenalty(length, *penalties))
        needs_tokens = True
    if temperature := _temperature(body, defaults):
        top_k = body.get("top_k", defaults.top_k)
        shares = [body.get(name, getattr(defaults, name)) for name in ("top_p", "min_p")]
        warpers += logits_warpers(temperature, max(top_k or 0, 0), *shares)
    return warpers, needs_tokens


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
    headers = {"x-request-id": _request_id(request), **(getattr(error, "headers", None) or {})}
    if getattr(error, "detail", None) == "Not Found":  # Starlette's, for paths that there are not
        paths = ", ".join([*ENDPOINTS, "/v1/models", "/health"])
        error = ApiError(404, f"Not Found: {request.method} {request.url.path}; there are {paths}", "unknown_url")
    return JSONResponse(error_body(error), getattr(error, "status_code", 500), headers)


def build_app(model: Any, tokenizer: Any, name: str, bits: CacheBits = PLAIN) -> tuple[FastAPI, Generator]:
    """Return the application and what generates for it.

    Args:
        model: a causal language model in evaluation mode.
        name: what requests call the model.
        bits: of the cache.
    """
    if unused := UNUSED_SETTINGS & model.generation_config.to_diff_dict().keys():
        logger.warning("generation_config.json sets %s, which this server does not apply", ", ".join(sorted(unused)))
    generator = Generator(model, tokenizer, bits)
    limit = min(BODY_BYTES_BESIDE + BODY_BYTES_PER_POSITION * model.config.max_position_embeddings, MAX_BODY_BYTES)
    slots = Middleware(RequestLimit, slots=asyncio.Semaphore(MAX_REQUESTS))

    async def respond(request: Request, endpoint: type[Completion]) -> Response:
        content = await _read_body(request, limit)
        read = partial(_read_answer, generator, name, request, content, endpoint)
        reading = asyncio.get_running_loop().run_in_executor(generator.reader, read)
        answer = await _unless_disconnected(request, reading)
        pieces, headers = generator.pieces(answer.choices), {"x-request-id": answer.id}
        if answer.body.get("stream"):
            return StreamingResponse(answer.events(pieces), headers=headers, media_type="text/event-stream")
        whole = await _unless_disconnected(request, answer.whole(pieces))
        return Response(await asyncio.to_thread(json.dumps, whole), headers=headers, media_type="application/json")

    routes = [
        Route(path, partial(respond, endpoint=endpoint), methods=["POST"], middleware=[slots])
        for path, endpoint in ENDPOINTS.items()
    ]
    app = FastAPI(openapi_url=None, routes=routes)  # type: ignore[arg-type]

    about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "leanqkv"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        check_model(model, name)
        return about

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
        raise LeanError(f"cannot listen on {host} port {port}: {reason}; choose another `host` or `port`") from None


class Server(uvicorn.Server):
    """A server whose shutdown does not wait for answers to be complete, which may take minutes."""

    def __init__(self, app: FastAPI, generator: Generator):
        options: Any = {"log_level": "warning", "access_log": False, "http": Connection}
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
    cache_bits: CacheBits = PLAIN,
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
    check_chat_template(tokenizer)
    Connection.most = most_connections()
    with _listen(host, port) as listener:  # before the weights, which may take long
        name = directory.resolve().name
        app, generator = build_app(load_model(opened, dtype).to(device), tokenizer, name, cache_bits)
        shown = f"[{host}]" if ":" in host else host
        started(name, f"http://{shown}:{listener.getsockname()[1]}/v1")
        gc.freeze()  # so that a collection looks at requests alone, and is short
        give_back_freed_memory()
        # Uvicorn raises the KeyboardInterrupt again when all is closed.
        with quiet_transformers(), closing(generator), suppress(KeyboardInterrupt):
            Server(app, generator).run(sockets=[listener])
