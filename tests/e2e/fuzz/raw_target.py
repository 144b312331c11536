"""Bytes that are almost HTTP/1.1 or HTTP/2, to the ports themselves.

What is broken here is the transport, so only two things are judged: the process lives, and HTTP is
not answered with a 500.
"""

import asyncio
import random
import struct
from contextlib import suppress

from tests.e2e.fuzz import http2_frames as h2
from tests.e2e.fuzz.case import Case, CaseVerdict
from tests.e2e.fuzz.json_bodies import change_bytes

ANSWER_S = 0.25
_BODY = b'{"prompt": "a", "max_tokens": 1}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: f\r\ncontent-type: application/json\r\n"
HTTP1 = (
    _HEAD + b"content-length: 32\r\n\r\n" + _BODY,
    _HEAD + b"transfer-encoding: chunked\r\n\r\n20\r\n" + _BODY + b"\r\n0\r\n\r\n",
    _HEAD + b"content-length: 32\r\ntransfer-encoding: chunked\r\n\r\n20\r\n" + _BODY,
    _HEAD + b"content-length: 32\r\ncontent-length: 3\r\n\r\n" + _BODY,
    _HEAD + b"content-length: -1\r\n\r\n" + _BODY,
    _HEAD + b"content-length: 99999999999999999999\r\n\r\n" + _BODY,
    _HEAD + b"expect: 100-continue\r\ncontent-length: 32\r\n\r\n" + _BODY,
    _HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n" + _BODY,
    _HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n20\r\n" + _BODY + b"\r\n0\r\n\r\n",
    _HEAD + b"content-encoding: gzip\r\ncontent-length: 32\r\n\r\n" + _BODY,
    b"GET /v1/models/%00%ff HTTP/1.1\r\nhost: f\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: f\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: f\r\n\r\n" * 20,
    b"GET /health HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade, http2-settings\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: f\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: f\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nhost: f\r\n\r\n",
    b"HEAD /v1/models HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
)
_PATHS = (
    "/pagewire.v1.InferenceService/Generate",
    "/pagewire.v1.SchedulerService/Session",
    "/pagewire.v1.WorkerService/Attach",
    "/grpc.health.v1.Health/Watch",
    "/nothing",
)


class RawTarget:
    """Scripts of bytes to one of several ports."""

    def __init__(self, name: str, ports: dict[str, tuple[str, int]]) -> None:
        self.name = name
        self._ports = ports

    def draw(self, rng: random.Random) -> Case:
        """A script for one of the ports."""
        where = rng.choice(list(self._ports))
        payload = _http1(rng) if self.name == "http1" else _http2(rng)
        return Case(self.name, where, payload)

    async def run(self, case: Case) -> CaseVerdict:
        """Sends the script; reads for a moment."""
        try:
            reader, writer = await asyncio.open_connection(*self._ports[case.name])
        except OSError as error:
            return CaseVerdict("refused", f"no connection: {error}", was_lost=True)
        answer = b""
        try:
            writer.write(case.payload)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await writer.drain()
                    if self.name == "http1" and len(case.payload) % 2:
                        writer.write_eof()
                    answer = await reader.read(1 << 16)
        except OSError:
            return CaseVerdict("reset")
        finally:
            writer.close()
        if self.name == "http2":
            return CaseVerdict("answered" if answer else "silent")
        status = answer[9:12].decode("latin-1")
        return CaseVerdict(status or "silent", "internal error" if status == "500" else "")

    async def close(self) -> None:
        """Nothing is open."""


def _http1(rng: random.Random) -> bytes:
    script = rng.choice(HTTP1)
    if rng.random() < 0.3:
        script += rng.choice(HTTP1)
    return change_bytes(script, rng) if rng.random() < 0.7 else script


def _http2(rng: random.Random) -> bytes:
    script = h2.opening() if rng.random() < 0.95 else b""
    for _ in range(rng.choice((1, 2, 4, 12))):
        script += _frame(rng)
    return change_bytes(script, rng) if rng.random() < 0.3 else script


def _frame(rng: random.Random) -> bytes:
    stream = rng.choice((0, 1, 1, 1, 3, 5, 2, h2.MAX_STREAM_ID))
    match rng.randrange(8):
        case 0:
            return h2.call(stream, rng.choice(_PATHS), rng.randbytes(rng.choice((0, 3, 40))))
        case 1:
            headers = h2.grpc_headers(rng.choice(_PATHS), (rng.randbytes(3), rng.randbytes(9)))
            return h2.frame(h2.HEADERS, headers, stream=stream, flags=rng.choice((0, 1, 4, 5, 255)))
        case 2:
            settings = struct.pack(">HI", rng.choice((1, 2, 3, 4, 5, 6, 99)), rng.getrandbits(32))
            return h2.frame(
                h2.SETTINGS, settings * rng.choice((1, 1, 50)), flags=rng.choice((0, 1))
            )
        case 3:
            return h2.frame(h2.PING, rng.randbytes(8)) * rng.choice((1, 5, 100))
        case 4:
            head = h2.frame(h2.HEADERS, h2.grpc_headers(rng.choice(_PATHS)), stream=1, flags=4)
            return head + h2.frame(h2.RST_STREAM, struct.pack(">I", h2.CANCEL), stream=1)
        case 5:
            return h2.frame(h2.WINDOW_UPDATE, struct.pack(">I", rng.getrandbits(32)), stream=stream)
        case 6:
            return h2.frame(h2.DATA, h2.message(rng.randbytes(9))[: rng.randrange(15)], stream=1)
        case _:
            return h2.frame(rng.randrange(256), rng.randbytes(rng.randrange(20)), stream=stream)
