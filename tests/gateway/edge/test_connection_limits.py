"""Limits of one HTTP connection: sizes, times, and readers that do not read; over real sockets."""

import asyncio
import json
import socket
from typing import Any

import pytest

from gateway.edge.edge_limits import EdgeLimits
from gateway.process.server import _listen
from tests.pace import paced, patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOON_S = paced(0.3)
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def send(running: Any, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to these bytes; the connection must then be closed."""
    host, port = running.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(patience(10)):
            head = await reader.readuntil(b"\r\n\r\n")
            rest = await reader.read()
    finally:
        writer.close()
    return int(head.split()[1]), json.loads(rest)["error"]


@pytest.mark.parametrize(
    "headers",
    [
        b"a: b\r\n" * 200,
        b"a: " + b"x" * 20_000 + b"\r\n",
        b"x" * 20_000 + b": b\r\n",
    ],
)
async def test_too_many_headers_or_bytes_of_them_are_a_431_that_names_the_options(
    headers: bytes, start: Any
) -> None:
    running = await start(edge=EdgeLimits(max_headers=100, max_header_bytes=10_000))
    status, error = await send(running, GET + headers + b"\r\n")
    assert status == 431
    assert (error["param"], error["code"]) == ("headers", "headers_too_large")
    assert "--max-headers" in error["message"] and "--max-header-bytes" in error["message"]


@pytest.mark.parametrize("begin", [GET + b"a: ", GET[:-2] + b"\r\nb", b"GET /"])
async def test_headers_without_an_end_are_refused_and_not_collected(
    begin: bytes, start: Any
) -> None:
    running = await start(edge=EdgeLimits(max_header_bytes=10_000))
    status, error = await send(running, begin, *[b"x" * 60_000] * 8)
    assert (status, error["code"]) == (431, "headers_too_large")


async def test_trailers_and_chunk_extensions_count_as_headers(start: Any) -> None:
    running = await start(edge=EdgeLimits(max_header_bytes=10_000))
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
    for rest in (b"2\r\n{}\r\n0\r\na: ", b"2;a="):
        status, error = await send(running, chunked, rest, *[b"x" * 60_000] * 8)
        assert (status, error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(("sent", "part"), [(b"", "header"), (GET, "header"), (b"\r\n", "header")])
async def test_headers_that_do_not_come_are_a_408(sent: bytes, part: str, start: Any) -> None:
    running = await start(edge=EdgeLimits(header_timeout_s=SOON_S))
    status, error = await send(running, sent)
    assert (status, error["param"]) == (408, part)
    assert f"--{part}-timeout-s" in error["message"]


async def test_a_body_that_does_not_come_is_a_408(start: Any) -> None:
    running = await start(edge=EdgeLimits(body_timeout_s=SOON_S))
    for head in (b"content-length: 9\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"):
        status, error = await send(running, POST + head)
        assert (status, error["param"]) == (408, "body")
        assert "--body-timeout-s" in error["message"]


async def test_a_slow_body_that_is_fast_enough_is_read(start: Any) -> None:
    running = await start(edge=EdgeLimits(body_timeout_s=SOON_S))
    body = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()

    async def slowly() -> Any:
        yield b" " * (8 << 20)  # at 64 KiB/s this may take two minutes
        await asyncio.sleep(2 * SOON_S)
        yield body

    headers = {"content-type": "application/json"}
    answer = await running.http.post("/v1/completions", content=slowly(), headers=headers)
    assert answer.status_code == 200, answer.text


async def test_an_idle_connection_outlives_those_of_pools() -> None:
    """Clients that pool connections saw a reset now and then at 5 s, and none at 75."""
    assert EdgeLimits().keep_alive_s >= 75


async def test_an_idle_connection_is_closed(start: Any) -> None:
    running = await start(edge=EdgeLimits(keep_alive_s=1))
    host, port = running.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(GET + b"\r\n")
    async with asyncio.timeout(patience(10)):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_a_client_that_does_not_read_its_stream_is_left_and_its_request_aborted(
    start: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen_with_small_buffers(*args: Any, **kwargs: Any) -> socket.socket:
        listener = _listen(*args, **kwargs)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr("gateway.process.server._listen", listen_with_small_buffers)
    running = await start(edge=EdgeLimits(write_timeout_s=SOON_S))
    running.scheduler.output = running.scheduler.output[:1] * 4000
    running.scheduler.hangs_after = 4000
    host, port = running.http_url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps({"prompt": "Hello", "stream": True}).encode()
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: bool(running.scheduler.aborted), "the request is aborted")


async def test_one_connection_too_many_is_closed(start: Any) -> None:
    running = await start(wait=False, edge=EdgeLimits(max_connections=1))
    host, port = running.http_url.removeprefix("http://").split(":")
    first = await asyncio.open_connection(host, int(port))
    await asyncio.sleep(0.05)
    reader, writer = await asyncio.open_connection(host, int(port))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        writer.write(GET + b"\r\n")
        await reader.readexactly(1)
    first[1].write(GET + b"\r\n")
    assert (await first[0].readexactly(12)) == b"HTTP/1.1 200"
    for opened in (writer, first[1]):
        opened.close()


async def test_what_is_not_http_is_a_400_in_the_form_of_every_error(start: Any) -> None:
    running = await start()
    for noise in (
        b"\0\1\2\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        status, error = await send(running, noise)
        assert (status, error["code"]) == (400, "invalid_value")


CLOSES = POST + b"connection: close\r\n"
MIB = b" " * (1 << 20)


@pytest.mark.parametrize(
    ("framing", "parts"),
    [
        (b"content-length: 41943040", [MIB] * 40),
        (b"transfer-encoding: chunked", [b"100000\r\n" + MIB + b"\r\n"] * 40 + [b"0\r\n\r\n"]),
    ],
)
async def test_a_client_that_closes_reads_why_its_large_body_is_refused(
    framing: bytes, parts: list[bytes], start: Any
) -> None:
    """Found by the fuzzer, seed 42: a reset by what was still being sent overtook the answer."""
    running = await start(edge=EdgeLimits(max_body_mib=1))
    status, error = await send(running, CLOSES + framing + b"\r\n\r\n", *parts)
    assert status == 413 and "--max-body-mib" in error["message"]


async def test_a_client_that_closes_and_never_sends_the_rest_is_left(start: Any) -> None:
    running = await start(edge=EdgeLimits(max_body_mib=1, body_timeout_s=SOON_S))
    host, port = running.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(CLOSES + b"content-length: 99999999\r\n\r\n ")
    async with asyncio.timeout(patience(10)):
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):
            while True:  # the answer has ended; sending works until the connection has, too
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(SOON_S * 4)
    writer.close()
