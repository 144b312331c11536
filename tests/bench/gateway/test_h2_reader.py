"""The minimal client of the gateway's benchmark, with a server of grpcio."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from bench.gateway.h2_reader import StreamFailed, read_all
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from tests.pace import patience

PATH = "/pagewire.v1.InferenceService/GenerateStream"
NUM_MESSAGES = 50
TEXT = "x" * 3000  # messages span frames of 16 KiB


class Answers(inference_pb2_grpc.InferenceServiceServicer):
    async def GenerateStream(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        if not request.prompt.text:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no prompt")
        for _ in range(NUM_MESSAGES):
            yield pb.GenerateStreamResponse(model=request.prompt.text + TEXT)


@pytest.mark.asyncio
async def test_every_message_of_every_stream_arrives_whole_and_a_refusal_is_told() -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Answers(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        request = pb.GenerateStreamRequest(prompt=pb.Prompt(text="a")).SerializeToString()
        read: list[list[bytes]] = [[], [], []]
        async with asyncio.timeout(patience(20)):
            await read_all(port, PATH, request, [one.append for one in read])
        wanted = pb.GenerateStreamResponse(model="a" + TEXT).SerializeToString()
        assert read == [[wanted] * NUM_MESSAGES] * 3
        with pytest.raises(StreamFailed, match="refused"):
            async with asyncio.timeout(patience(20)):
                await read_all(port, PATH, b"", [lambda _: None])
    finally:
        await server.stop(0)
