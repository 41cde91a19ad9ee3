"""An OpenAI-compatible server for one model: that of `transformers serve`, with what it lacks put around it.

Its handlers read requests and write answers, its thread generates. Here are: one model instead of whatever is asked
for; refusals with OpenAI's status codes where it answers 500 or ignores a field; sampling and seeds per request; stop
strings that stay out of the text; an end to generating for whoever has hung up.
"""

import asyncio
import copy
import json
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState, _StreamError

from ..checkpoints import load_config, load_model
from ..data.tokenizer import load_tokenizer
from ..errors import LeanError
from ..quiet import quiet_transformers
from . import prepared

PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/health"}
# Tokens of an answer whose length was not asked for, as in transformers.
NEW_TOKENS = 1024
BODY_BYTES = 8 * 2**20
SECONDS_TO_CLOSE = 3  # for clients that read too slowly to take the rest of what was written

LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# Fields that are read, and those that change nothing about the text. Any other is refused, unless it asks for nothing.
READ = {
    *("model", "prompt", "messages", "input", "instructions", "chat_template_kwargs"),
    *(*LENGTHS, "temperature", "top_p", "seed", "stop", "stream"),
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "tool_choice"}
PLAIN: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}


class Refusal(HTTPException):
    """A request that cannot be answered, with OpenAI's code for why where it has one."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(status, message)
        self.code = code


class _ServerEnds(_StreamError):
    """The last that a stream says when it is not at its end but the server is."""


class _Ended(Exception):
    """Leaves `generate` before its end."""


class _Stream:
    """What `generate` calls with every token: passes the text on, up to the first stop string."""

    def __init__(self, tokenizer: Any, stops: list[str], send: Callable[[Any], None]):
        self.ids: list[int] = []
        self.stopped = False
        self.cancelled = threading.Event()
        self.send = send
        self._tokenizer, self._stops = tokenizer._tokenizer, stops
        self._decoder = DecodeStream([], skip_special_tokens=True)
        self._text, self._sent = "", 0
        self._prompt = True

    @property
    def total_tokens(self) -> int:
        return len(self.ids)

    def cancel(self) -> None:
        self.cancelled.set()

    def put(self, value: torch.Tensor) -> None:
        if self.cancelled.is_set():
            raise _Ended
        if self._prompt:  # comes first, as a whole
            self._prompt = False
            return
        for token in value.tolist():
            self.ids.append(token)
            self._text += self._decoder.step(self._tokenizer, token) or ""
        self._pass_on(held=max((_overlap(self._text, stop) for stop in self._stops), default=0))

    def end(self) -> None:
        # The decoder waits for the rest of a character that now is not going to come.
        text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
        if text.startswith(self._text):
            self._text = text
        self._pass_on(held=0)

    def _pass_on(self, held: int) -> None:
        found = [at for stop in self._stops if (at := self._text.find(stop, self._sent)) >= 0]
        ready = min(found, default=len(self._text) - held)
        if ready > self._sent:
            self.send(self._text[self._sent : ready])
            self._sent = ready
        if found:
            self.stopped = True
            raise _Ended


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


# The streams of the request at hand, for whom it is that hangs up.
_streams: ContextVar[list[_Stream]] = ContextVar("streams")


class _Generation(GenerateManager):
    """One request after the other, on one thread, as transformers does; whole answers are streams put together."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[_Stream] = set()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, Any]:
        _fit(gen_config, inputs["input_ids"].shape[-1], model.config.max_position_embeddings)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()  # type: ignore[var-annotated]

        def send(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        stream = _Stream(processor, gen_config.stop_strings or [], send)
        _streams.get().append(stream)
        self._open.add(stream)
        seed, gen_config.stop_strings = gen_config.seed, None
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")}

        def generate() -> None:
            try:
                if not stream.cancelled.is_set():
                    run()
            finally:
                self._open.discard(stream)

        def run() -> None:
            # Here and not where the request is read: another one may be generating then.
            torch.seed() if seed is None else torch.manual_seed(seed)
            try:
                model.generate(**arguments, generation_config=gen_config, streamer=stream)
            except _Ended:
                pass
            except Exception as error:
                send(_StreamError(json.dumps(str(error))[1:-1]))  # the handler puts it between quotes
                raise
            if stream.stopped or _end_tokens(gen_config).intersection(stream.ids[-1:]):
                gen_config.max_new_tokens = None  # the handler takes an answer of that many for one that was cut off
            send(None)

        self.submit(generate)
        return queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        queue, stream = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        parts = []
        while (item := await queue.get()) is not None:
            if isinstance(item, _StreamError):
                raise Refusal(503, item.msg) if isinstance(item, _ServerEnds) else RuntimeError(item.msg)
            parts.append(item)
        return "".join(parts), inputs["input_ids"].shape[-1], stream.ids

    def stop(self) -> None:
        """Ends every answer, those that wait for their turn as well, with an error."""
        for stream in tuple(self._open):
            stream.send(_ServerEnds("the server was ended"))
            stream.cancel()


def _end_tokens(config: GenerationConfig) -> set[int]:
    end = config.eos_token_id
    return set(end) if isinstance(end, list) else set() if end is None else {end}


def _fit(config: GenerationConfig, prompt: int, positions: int) -> None:
    """Prompt and answer within the model's positions, as many as it was trained on."""
    room = positions - prompt
    if config.max_new_tokens is None:
        config.max_new_tokens = min(room, NEW_TOKENS)
    if room < 1 or config.max_new_tokens > room:
        asked = f" and {config.max_new_tokens} new ones" if room > 0 else ""
        raise Refusal(
            400,
            f"the model has {positions} positions, found a prompt of {prompt} tokens{asked}: ask for less",
            "context_length_exceeded",
        )


class _State(GenerationState):
    def __init__(self, generation: _Generation):
        super().__init__()
        self.generation = generation

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Generation:
        return self.generation


class _OneModel(ModelManager):
    """The model that is served, whatever transformers asks for."""

    def __init__(self, model: Any, tokenizer: Any, name: str):
        # Not the parent's: it loads by name, from the hub if need be, and forgets after a while.
        self.model, self.tokenizer, self.force_model = model, tokenizer, name

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # type: ignore[override]
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "leanqkv"}]

    def shutdown(self) -> None:
        pass


class _Handler:
    """Before one of transformers' handlers: what it reads wrongly or not at all is refused or read here."""

    model_manager: _OneModel
    chat = True

    async def handle_request(self, body: dict, request_id: str) -> Any:
        _check(body, self.model_manager.force_model)
        tokenizer = self.model_manager.tokenizer
        if self.chat and not tokenizer.chat_template:
            raise Refusal(400, "this model has no chat template, it continues text: use /v1/completions")
        if not self.chat:  # no prompt is the beginning of a text, as in `leanqkv generate`
            body["prompt"] = body.get("prompt") or tokenizer.eos_token
        body["stream"] = bool(body.get("stream"))
        try:
            response = await super().handle_request(body, request_id)  # type: ignore[misc]
        # Generation raises RuntimeError; until then there is nothing but the request to be wrong.
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise Refusal(400, f"the request cannot be read: {type(error).__name__}: {error}") from error
        if isinstance(response, StreamingResponse) and not isinstance(self, ResponseHandler):
            response.body_iterator = _with_done(response.body_iterator)
        return response

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        # Not the parent's: it sets the seed of whoever is generating, and only samples if the model's defaults do.
        config = copy.deepcopy(model_generation_config)
        temperature = _given(body, "temperature", 1.0 if config.temperature is None else config.temperature)
        config.do_sample = temperature > 0
        config.temperature = temperature or None
        config.top_p = _given(body, "top_p", config.top_p) if temperature else None
        config.top_k = (config.top_k or 0) if temperature else None  # transformers takes 50 for none
        config.max_new_tokens = next((body[name] for name in LENGTHS if body.get(name) is not None), None)
        stop = body.get("stop")
        config.stop_strings = [stop] if isinstance(stop, str) else stop
        config.seed = body.get("seed")
        return config


class _Completions(_Handler, CompletionHandler):  # type: ignore[misc]
    chat = False


class _Chat(_Handler, ChatCompletionHandler):  # type: ignore[misc]
    pass


class _Responses(_Handler, ResponseHandler):  # type: ignore[misc]
    pass


def _given(body: dict, name: str, default: Any) -> Any:
    return default if body.get(name) is None else body[name]


def _check(body: dict, model: Any) -> None:
    """Raises:
    Refusal: another model, a field out of its range, or one that is not supported.
    """
    if _given(body, "model", model) != model:
        raise Refusal(404, f"there is no model {body['model']!r} here, only {model!r}", "model_not_found")
    for name, value in body.items():
        if name not in READ | WITHOUT_EFFECT and value and value != PLAIN.get(name):
            raise Refusal(400, f"{name} is not supported", "unsupported_parameter")

    def number(value: Any, kind: Any = (int, float)) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)

    def strings(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) and item for item in value)

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(LENGTHS, (lambda value: number(value, int) and value > 0, "a positive integer")),
        "temperature": (lambda value: number(value) and value >= 0, "a number from 0"),
        "top_p": (lambda value: number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
        "seed": (lambda value: number(value, int) and abs(value) < 2**63, "an integer of 64 bits"),
        "stop": (lambda value: strings([value]) or strings(value), "a string that is not empty, or a list of such"),
        "stream": (lambda value: isinstance(value, bool), "true or false"),
        "prompt": (lambda value: isinstance(value, str), "a string"),
    }
    for name, (holds, what) in rules.items():
        if body.get(name) is not None and not holds(body[name]):
            raise Refusal(400, f"{name} is {what}, found {body[name]!r:.100}")


async def _with_done(chunks: Any) -> AsyncIterator[str]:
    """Server-sent events with the line that OpenAI ends them with."""
    async for chunk in chunks:
        yield chunk
    yield "data: [DONE]\n\n"


class _HangUp:
    """Ends a request whose client is gone: what answers it is cancelled, and so is what generates for it."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages, size = [], 0
        while True:
            messages.append(message := await receive())
            size += len(message.get("body", b""))
            if size > BODY_BYTES:
                message = f"the body is larger than {BODY_BYTES:,} bytes"
                await _error(413, message)(scope, receive, send)
                return
            if not message.get("more_body"):
                break
        gone = asyncio.ensure_future(receive())  # all that can follow the body

        async def replay() -> Any:
            return messages.pop(0) if messages else await asyncio.shield(gone)

        streams: list[_Stream] = []
        _streams.set(streams)
        answer = asyncio.ensure_future(self.app(scope, replay, send))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
            gone.cancel()
            await asyncio.wait((answer,))
            for stream in streams:
                stream.cancel()
        if not answer.cancelled():
            answer.result()


def _error(status: int, message: str, code: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def build_app(model: Any, tokenizer: Any, name: str) -> tuple[FastAPI, _Generation]:
    """The application, and what generates for it.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer, a fast one.
        name: what requests call the model.
    """
    tokenizer.response_template = None  # tools are refused, so nothing is read out of an answer
    models, generation = _OneModel(model, tokenizer, name), _Generation()
    state = _State(generation)
    app = build_server(
        models,
        chat_handler=_Chat(models, state),
        completion_handler=_Completions(models, state),
        response_handler=_Responses(models, state),
        transcription_handler=None,  # type: ignore[arg-type]
        systemone_handler=None,  # type: ignore[arg-type]
        generation_state=state,
    )
    # The others load and unload models, or need what is None.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in PATHS]

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Any, error: StarletteHTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), getattr(error, "code", None))

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Any, error: RequestValidationError) -> JSONResponse:
        return _error(400, f"the body is not a JSON object: {error.errors()[0]['msg']}")

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {error}")

    app.add_middleware(_HangUp)
    return app, generation


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        # Of an address that has no name the number is negative, and not the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise LeanError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None


class _Server(uvicorn.Server):
    def __init__(self, app: FastAPI, generation: _Generation):
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SECONDS_TO_CLOSE)
        super().__init__(config)
        self.generation = generation

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.generation.stop()  # uvicorn waits for answers to end, which may take minutes
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
    """Serves the model in `directory` under the directory's name, until SIGINT.

    Args:
        port: 0 for any that is free.
        dtype: of the weights; None: as stored.
        started: is told the model's name and the address when requests can come.

    Raises:
        LeanError: no causal language model or no tokenizer in `directory`; an address that cannot be listened on.
    """
    if (task := load_config(directory).task) != "causal_lm":
        raise LeanError(f"{directory} holds a model for {task}, which does not continue text")
    tokenizer = load_tokenizer(directory)
    with _listen(host, port) as listener:  # before the weights, which may take long
        model: Any = load_model(directory)
        model = prepared(model.to(device=device, dtype=dtype or model.dtype))
        name = directory.resolve().name
        app, generation = build_app(model, tokenizer, name)
        shown = f"[{host}]" if ":" in host else host
        started(name, f"http://{shown}:{listener.getsockname()[1]}/v1")
        with quiet_transformers():
            try:
                _Server(app, generation).run(sockets=[listener])
            except KeyboardInterrupt:  # raised again by uvicorn when all is closed
                pass
            finally:
                generation.submit(lambda: None).result()  # an interpreter must not end under a thread in torch
