"""Requests that ask for another protocol are answered as if they did not; over real sockets."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gateway.edge.edge_limits import EdgeLimits
from tests.gateway.http_calls import connected
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
UPGRADES = {
    "as the JDK writes it": H2C,
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    "a later TLS": b"CONNECTION: keep-alive, UpGrade\r\nUPGRADE: TLS/1.2, h2c/9\r\n",
    "twice": b"Upgrade: a\r\nConnection: upgrade\r\nupgrade:\r\nUpgrade: b\r\nConnection: x\r\n",
    "an unknown one": b"upgrade: \xe9?\r\nconnection: upgrade\r\n",
}
BODY = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
# A body that is itself a request, as a smuggler writes it; as JSON it is nothing.
SMUGGLED = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def with_length(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]))
    return b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def whole(request: bytes) -> list[bytes]:
    return [request]


def body_apart(request: bytes) -> list[bytes]:
    head, end, body = request.partition(b"\r\n\r\n")
    return [head + end, body]


def byte_by_byte(request: bytes) -> list[bytes]:
    return [request[at : at + 1] for at in range(len(request))]


async def send(writer: Any, segments: Iterable[bytes]) -> None:
    for segment in segments:
        writer.write(segment)
        await writer.drain()
        await asyncio.sleep(0)  # the gateway, on this loop, reads them one by one


async def read(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of the next answer on a connection that goes on."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


@pytest.mark.parametrize("cut", [whole, body_apart, byte_by_byte])
@pytest.mark.parametrize("framed", [with_length, chunked])
@pytest.mark.parametrize("asking", UPGRADES)
async def test_the_body_of_a_request_that_asks_for_an_upgrade_is_read(
    asking: str, framed: Any, cut: Any, running: Any
) -> None:
    async with connected(running) as (reader, writer):
        for _ in range(2):  # the connection is kept
            await send(writer, cut(HEAD + UPGRADES[asking] + framed(BODY)))
            status, answer = await read(reader)
            assert status == 200, answer
            assert answer["object"] == "text_completion"


@pytest.mark.parametrize("cut", [whole, body_apart, byte_by_byte])
@pytest.mark.parametrize("framed", [with_length, chunked])
async def test_a_body_after_an_upgrade_is_never_another_request(
    framed: Any, cut: Any, running: Any
) -> None:
    async with connected(running) as (reader, writer):
        await send(writer, cut(HEAD + H2C + framed(SMUGGLED)))
        status, answer = await read(reader)
        assert status == 400 and "not valid JSON" in answer["error"]["message"]
        await send(writer, [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
        assert await read(reader) == (200, {"status": "alive"})


async def test_requests_after_an_upgrade_are_answered_in_their_order(running: Any) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n"
    one = HEAD + H2C + with_length(BODY)
    async with connected(running) as (reader, writer):
        await send(writer, [get + one + get + HEAD + chunked(BODY) + one + get])
        answers = [await read(reader) for _ in range(6)]
    assert [status for status, _ in answers] == [200] * 6
    kinds = [answer.get("object", "health") for _, answer in answers]
    assert kinds == ["health", "text_completion", "health", *["text_completion"] * 2, "health"]


async def test_an_upgrade_in_the_trailers_is_none(running: Any) -> None:
    trailers = b"0\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    request = HEAD + chunked(BODY).removesuffix(b"0\r\n\r\n") + trailers
    async with connected(running) as (reader, writer):
        await send(writer, [request + HEAD + with_length(BODY)])
        assert [(await read(reader))[0] for _ in range(2)] == [200, 200]


async def test_trailers_do_not_join_the_headers(running: Any) -> None:
    """The guards have judged the headers by then."""
    trailers = b"0\r\nx-request-id: from-a-trailer\r\n\r\n"
    request = HEAD + chunked(BODY).removesuffix(b"0\r\n\r\n") + trailers
    async with connected(running) as (reader, writer):
        await send(writer, [request])
        status, answer = await read(reader)
        assert status == 200 and answer["id"].startswith("cmpl-")


@pytest.mark.parametrize("upgrade", [b"", H2C])
async def test_connect_is_refused_and_nothing_after_it_is_a_request(
    upgrade: bytes, running: Any
) -> None:
    head = b"CONNECT example.com:80 HTTP/1.1\r\nhost: example.com\r\n" + upgrade
    async with connected(running) as (reader, writer):
        await send(writer, [head + with_length(SMUGGLED), SMUGGLED])
        answered = await reader.read()
    assert answered.startswith(b"HTTP/1.1 405 ") and answered.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("body", [b"content-length: 2097152\r\n\r\n", chunked(b" " * (2 << 20))])
async def test_an_upgrade_lifts_no_limit(body: bytes, start: Any) -> None:
    running = await start(edge=EdgeLimits(max_body_mib=1, max_headers=10, max_header_bytes=10_000))
    async with connected(running) as (reader, writer):
        await send(writer, [HEAD + H2C + body])
        assert (await read(reader))[0] == 413
    async with connected(running) as (reader, writer):
        await send(writer, [HEAD + b"a: b\r\n" * 9 + H2C + b"\r\n"])
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


needs_java = pytest.mark.skipif(shutil.which("javac") is None, reason="needs a Java compiler")


@needs_java
async def test_the_client_of_the_java_library_is_answered(running: Any, tmp_path: Path) -> None:
    source = Path(__file__).parent / "jdk" / "Ask.java"
    compiling = ["javac", "-d", str(tmp_path), str(source)]
    await asyncio.to_thread(subprocess.run, compiling, check=True, timeout=patience(120))
    bodies = [{"prompt": "Hello"}, {"prompt": "Hello", "stream": True}, {"prompt": 1}]
    asking = ["java", "-cp", str(tmp_path), "Ask", f"{running.http_url}/v1/completions"]
    asking += [json.dumps(body) for body in (*bodies, *bodies)]
    told = await asyncio.to_thread(
        subprocess.run, asking, check=True, capture_output=True, text=True, timeout=patience(120)
    )
    answers = told.stdout.splitlines()
    assert [line.split()[0] for line in answers] == ["200", "200", "400"] * 2, told.stdout
    assert '"object":"text_completion"' in answers[0].replace(" ", "")
    assert answers[1].rstrip().endswith("[DONE]")
