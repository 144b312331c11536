"""The benchmark's HTTP client, with answers split at arbitrary places."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire import Usage
from pagewire.cli.benchmark.load import RequestFailed, StreamArrival
from pagewire.cli.benchmark.openai_http import OpenAIServer

EVENTS = [
    {"choices": [{"text": "é"}], "usage": None},
    {"choices": [{"text": "b"}], "usage": None},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]
STREAM = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in EVENTS)
DONE = "data: [DONE]\n\n"


def chunked(body: bytes, size: int, status: str = "200 OK") -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[OpenAIServer, list[bytes]]]:
    """A server that gives one answer to all, and the requests it received."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield OpenAIServer(f"http://127.0.0.1:{port}/", api_key="secret"), asked


async def arrivals(server: OpenAIServer) -> list[StreamArrival]:
    return [arrival async for arrival in server.stream([1, 2, 3], 2, "tiny")]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_events_are_read_however_they_are_cut(size: int) -> None:
    async with answering(chunked((STREAM + DONE).encode(), size)) as (server, asked):
        found = await arrivals(server)
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    assert found == [StreamArrival(1), StreamArrival(1), StreamArrival(0, usage)]
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    request = json.loads(body)
    assert (request["prompt"], request["max_tokens"]) == ([1, 2, 3], 2)
    assert (request["ignore_eos"], request["stream"]) == (True, True)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (chunked(STREAM.encode(), 50), "broke off"),
        (chunked((STREAM + DONE).encode(), 50)[:-90], "IncompleteRead|broke off"),
        (chunked(b'{"error": "no such model"}', 50, "404 Not Found"), "404: .*no such model"),
        (chunked(b'data: {"error": {"message": "lost"}}\n\n', 50), "lost"),
        (b"", "is no answer of HTTP/1"),
        (b"SSH-2.0\r\n", "SSH-2.0.* is no answer of HTTP/1"),
    ],
)
async def test_what_is_no_whole_answer_is_a_failure(answer: bytes, problem: str) -> None:
    async with answering(answer) as (server, _):
        with pytest.raises(RequestFailed, match=problem):
            await arrivals(server)


async def test_models_are_listed_and_nobody_there_is_a_failure() -> None:
    body = json.dumps({"data": [{"id": "tiny", "max_model_len": 64}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with answering(answer) as (server, _):
        assert await server.models() == [{"id": "tiny", "max_model_len": 64}]
    with pytest.raises(RequestFailed, match=r"127\.0\.0\.1"):
        await server.models()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--url"):
        OpenAIServer(url)
