"""HTTP connections of clients that may be slow, idle or hostile: none of them keeps the others waiting."""

import asyncio
import socket
from importlib.util import find_spec
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if find_spec("resource"):  # not on Windows
    import resource
else:
    resource: Any = None  # type: ignore[no-redef]

REQUEST_SECONDS = 20  # for a client to send a request, headers and body
# A chunk of a body costs about as much as a kilobyte; so many may be smaller than this many bytes on average.
SMALL_CHUNKS, CHUNK_BYTES = 512, 64
# Connections at a time, where the system allows as many open files, of which others are needed too.
MAX_CONNECTIONS, OTHER_FILES = 8192, 128


def most_connections() -> int:
    """Return how many connections may be open, after allowing this process as many files as that takes."""
    if resource is None:
        return MAX_CONNECTIONS
    soft, hard = (
        MAX_CONNECTIONS + OTHER_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < (wanted := min(hard, MAX_CONNECTIONS + OTHER_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, min(max(soft, wanted) - OTHER_FILES, MAX_CONNECTIONS))


class _Parser(h11.Connection):
    """A parser that refuses bodies in many tiny chunks: it would do nothing else as long as they come."""

    chunks = size = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = self.size = 0
        elif isinstance(event, h11.Data):
            self.chunks, self.size = self.chunks + 1, self.size + len(event.data)
            if self.chunks > SMALL_CHUNKS and self.size < CHUNK_BYTES * self.chunks:
                raise h11.RemoteProtocolError("a body in tiny chunks")
        return event


class Connection(H11Protocol):
    """A connection that ends when its client takes more than REQUEST_SECONDS for a request, or the files run out."""

    most = MAX_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None  # while its client has not sent a whole request

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.conn = _Parser(h11.SERVER, self.config.h11_max_incomplete_event_size or 2**16)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # An answer has two parts, and the second must not wait for the client to acknowledge the first.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.most:
            waiting: list[Any] = [one for one in self.connections if getattr(one, "_deadline", None) is not None]
            if waiting:
                oldest = min(waiting, key=lambda one: one._deadline.when())
                oldest._cancel()
                oldest.transport.abort()
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
        # A client that is being answered, or that has sent nothing, cannot be told.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and self.conn.their_state is not h11.ERROR:
            headers = [("connection", "close"), ("content-length", "0")]
            response = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            self.transport.write(self.conn.send(response))
        self.transport.close()
