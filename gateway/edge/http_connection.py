"""One HTTP connection: uvicorn's, with limits on size and time that it lacks.

What a client sends is bounded before any route sees it: the number and bytes of headers, and the
time until headers and body are complete. A client that reads its answer too slowly is left.
"""

import asyncio
import json
import logging
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.callers.request_ids import PREFIX, REQUEST_ID, new_id
from gateway.edge import upgrades
from gateway.edge.edge_limits import EdgeLimits
from gateway.edge.lingering import LingeringTransport
from gateway.errors.request_errors import ErrorKind, RequestError, error_body

BODY_BYTES_PER_S = 64 << 10  # a body that comes faster may take as long as it needs
# After a refusal so many bytes are read and dropped, for so long, so that it can be read: a
# connection that is closed with bytes unread loses what was written to it.
MAX_DROPPED_BYTES = 64 << 20
LINGER_S = 2.0
OVERHEAD_PER_BYTE = 16  # of the transfer: a chunk of one byte has five more

log = logging.getLogger("gateway.edge.http_connection")


class _Phase(Enum):
    """The part of a request that the client is to send next."""

    HEADERS = auto()
    BODY = auto()
    NOTHING = auto()  # a request is complete; another may follow
    END = auto()  # of the connection: the request was refused


class _Refused(Exception):
    """Raised in the parser's callbacks; the parser then reports a broken request."""


def guarded(limits: EdgeLimits) -> type[asyncio.Protocol]:
    """The class of connections for uvicorn."""
    return cast(type[asyncio.Protocol], partial(GuardedConnection, limits))


class GuardedConnection(HttpToolsProtocol):
    """A connection with limits."""

    def __init__(self, limits: EdgeLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._refusal: RequestError | None = None
        self._phase = _Phase.HEADERS
        self._began_s = 0.0  # the phase
        self._num_headers = self._num_header_bytes = 0
        self._num_raw_bytes = self._num_body_bytes = self._num_dropped = 0
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # --- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection; one too many is closed."""
        lingering = LingeringTransport(transport, self._drops_body)
        super().connection_made(cast(asyncio.Transport, lingering))
        self._lingering = lingering
        if len(self.connections) > self._limits.max_connections:
            log.warning("--max-connections: %d are open", len(self.connections) - 1)
            transport.abort()
            return
        self._enter(_Phase.HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not read what was written: from now on it has limited time."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.write_timeout_s, self._leave)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _leave(self) -> None:
        log.warning("--write-timeout-s: a client does not read its answer")
        self.transport.abort()

    # --- what the client sends -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, unless the client sent too much besides bodies."""
        if self._phase is _Phase.END:
            self._drop(len(data))
            return
        if self._phase is _Phase.NOTHING:
            self._enter(_Phase.HEADERS)
        self._num_raw_bytes += len(data)
        spared = OVERHEAD_PER_BYTE * self._num_body_bytes
        # Counted before it is parsed, so one read may exceed the limit.
        if self._num_raw_bytes - len(data) > self._limits.max_header_bytes + spared:
            self._refuse_headers()
            self.send_400_response("")
            return
        self._unset_keepalive_if_required()
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        rest: memoryview | None = memoryview(data)
        try:
            while rest is not None:
                rest = self._parse_some(rest)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _parse_some(self, data: memoryview) -> memoryview | None:
        """Parses up to the end of a head that asks for another protocol; what follows it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return data[upgrade.args[0] :]
        return None

    def _ignore_upgrade(self) -> None:
        """Reads the head again without what asked for the upgrade."""
        asking = self.parser
        head = upgrades.head_without_upgrade(
            asking.get_method(), self.url, asking.get_http_version(), self.headers
        )
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        """Starts the counts of a request."""
        super().on_message_begin()
        self._num_headers = self._num_header_bytes = 0
        self._num_raw_bytes = self._num_body_bytes = 0
        if self._phase is not _Phase.HEADERS:
            self._enter(_Phase.HEADERS)

    def on_url(self, url: bytes) -> None:
        """Counts the URL as a header."""
        self._num_header_bytes += len(url)
        self._check_headers()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, or a trailer, which is dropped: guards have judged the headers."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        self._check_headers()
        if self._phase is _Phase.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body follows, which may be empty."""
        if self.parser.should_upgrade():  # the head is about to be read again
            self._refuse_tunnel()
            return
        self._enter(_Phase.BODY)
        super().on_headers_complete()

    def _refuse_tunnel(self) -> None:
        """Refuses CONNECT: what follows it is not HTTP."""
        if self.parser.get_method() == upgrades.TUNNEL:
            problem = "CONNECT is not answered: this is no proxy"
            self._refusal = RequestError(ErrorKind.METHOD_NOT_ALLOWED, problem)
            raise _Refused

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body; the routes bound what they read."""
        self._num_body_bytes += len(body)
        if self.cycle.response_complete:
            self._drop(len(body))
        super().on_body(body)

    def _drops_body(self) -> bool:
        """True if a request was answered before its body had come."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return self._phase is _Phase.BODY and is_answered

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DROPPED_BYTES:
            self.transport.abort()

    def on_message_complete(self) -> None:
        """From now on the client waits."""
        if self._phase is _Phase.HEADERS:  # of a head that is about to be read again
            return
        self._enter(_Phase.NOTHING)
        self._num_raw_bytes = self._num_dropped = 0
        super().on_message_complete()
        if self._lingering.is_lingering:
            self._lingering.close_at_once()

    def _check_headers(self) -> None:
        limits = self._limits
        if self._num_headers > limits.max_headers or (
            self._num_header_bytes > limits.max_header_bytes
        ):
            self._refuse_headers()
            raise _Refused

    def _refuse_headers(self) -> None:
        problem = (
            f"headers: at most {self._limits.max_headers} (--max-headers) with "
            f"{self._limits.max_header_bytes} bytes (--max-header-bytes) are read"
        )
        self._refusal = RequestError(ErrorKind.HEADERS_TOO_LARGE, problem, field="headers")

    # --- time ------------------------------------------------------------------------------------

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._began_s = phase, self.loop.time()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if phase is _Phase.END:
            self._reading = self.loop.call_later(LINGER_S, self._lingering.close_at_once)
        elif phase is not _Phase.NOTHING:
            self._reading = self.loop.call_later(self._allowed_s(), self._check_time)

    def _allowed_s(self) -> float:
        if self._phase is _Phase.HEADERS:
            return self._limits.header_timeout_s
        return self._limits.body_timeout_s + self._num_body_bytes / BODY_BYTES_PER_S

    def _check_time(self) -> None:
        left_s = self._began_s + self._allowed_s() - self.loop.time()
        if self.flow.read_paused:  # it is we who do not read
            left_s = self._allowed_s()
        if left_s > 0:
            self._reading = self.loop.call_later(left_s, self._check_time)
            return
        if self._drops_body():  # the client has its answer
            self.transport.abort()
            return
        part = "header" if self._phase is _Phase.HEADERS else "body"
        problem = f"{part}: it was not complete in time (--{part}-timeout-s)"
        self._refusal = RequestError(ErrorKind.TOO_SLOW, problem, field=part)
        self.send_400_response("")

    # --- refusals --------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answers a request that no route has answered, in the form of every error, and closes."""
        if self.transport.is_closing():
            return
        if (
            self.cycle is not None
            and self.cycle.response_started
            and (not self.cycle.response_complete)
        ):
            self.transport.abort()  # an answer of this client is on its way
            return
        malformed = RequestError(ErrorKind.INVALID, "the request is not valid HTTP/1.1")
        error = self._refusal or malformed
        body = json.dumps(error_body(error)).encode()
        status = error.wire.http_status
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            f"{REQUEST_ID}: {new_id(PREFIX)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._enter(_Phase.END)
