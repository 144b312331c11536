"""A call with any path is refused alone; the server and the other calls go on."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from tests.e2e.fuzz import http2_frames as h2
from tests.pace import patience
from wire.aio.server import aio_server
from wire.server import SERVER_OPTIONS, register

pytestmark = pytest.mark.asyncio
PATHS = (b"/Test/\x8f", b"/\xff\xfe/Echo", b"/Test/Nothing", b"/", b"/" + b"x" * 3000)


async def echo(request: bytes, _: Any) -> bytes:
    return request


def call(port: int, path: bytes) -> bytes:
    """The server's answer to a call with this path."""
    headers = (
        *((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")),
        *((b"content-type", b"application/grpc"), (b"te", b"trailers")),
    )
    head = h2.frame(h2.HEADERS, h2.header_block(headers), stream=1, flags=h2.END_HEADERS)
    with socket.create_connection(("127.0.0.1", port), patience(5)) as client:
        client.sendall(h2.opening() + head)
        client.sendall(h2.frame(h2.DATA, h2.message(b""), stream=1, flags=h2.END_STREAM))
        answer = b""
        while b"grpc-status" not in answer and (more := client.recv(65536)):
            answer += more
    return answer


async def test_a_method_that_is_no_unicode_is_unimplemented_and_the_server_lives() -> None:
    server = aio_server(SERVER_OPTIONS)
    register(server, "Test", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for path in PATHS:
            answer = await asyncio.to_thread(call, port, path)
            assert b"grpc-status\x0212" in answer, (path, answer)
            assert await channel.unary_unary("/Test/Echo")(b"hello") == b"hello"
    await server.stop(0)
