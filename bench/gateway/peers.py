"""The two processes around the gateway measured by `bench.gateway`, each with its own core.

    python -m bench.gateway.peers source ...     a scheduler: scripted tokens at a given rate
    python -m bench.gateway.peers readers ...    the clients: as many streams as wished

Neither is counted. Both note times by the clock that all processes of a host share.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from bench.gateway.h2_reader import read_all
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from wire import columns
from wire.server import SERVER_OPTIONS, bind

GENERATE_STREAM = "/pagewire.v1.InferenceService/GenerateStream"
MODEL_NAME = "scripted"
PROMPT = "Tell me about the gateway."
SAMPLE_EVERY = 16  # one stream of this many has its pieces timed
TEXT = (
    "A gateway turns text into token ids and token ids into text, and does so for many clients at "
    "once; what it must never do is keep a token that a client waits for. "
)


def script(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """The tokens of every output: ordinary words, repeated."""
    once: list[int] = tokenizer._tokenizer.encode(TEXT, add_special_tokens=False).ids
    return (once * (num_tokens // len(once) + 1))[:num_tokens]


def say(what: dict[str, Any]) -> None:
    """Prints one line for the parent process."""
    print(json.dumps(what), flush=True)


Outbox = asyncio.Queue[scheduler_pb2.SessionResponse]


class TokenSource(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Waits for its streams, then sends one token per step to each until the script ends.

    They may come from several gateways: each has a session, and all sessions step together.
    """

    def __init__(
        self, model: types_pb2.ModelInfo, token_ids: list[int], num_streams: int, rate: float
    ) -> None:
        self._model = model
        self._token_ids = token_ids
        self._num_streams = num_streams
        self._step_s = num_streams / rate if rate else 0.0
        self._pause_s = 0.2 if num_streams > 1 else 0.0
        self._handles: dict[Outbox, list[int]] = {}  # of each session, for the next round
        self._playing: asyncio.Task[None] | None = None

    async def GetStatus(self, request: Any, context: Any) -> scheduler_pb2.GetStatusResponse:
        return scheduler_pb2.GetStatusResponse(ready=True, model=self._model)

    async def Session(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        outbox: Outbox = asyncio.Queue(maxsize=1)  # a gateway that does not read stops the source
        self._handles[outbox] = []
        say({"num_sessions": len(self._handles)})
        reading = asyncio.create_task(self._read(requests, outbox))
        try:
            while True:
                yield await outbox.get()
        finally:
            del self._handles[outbox]
            reading.cancel()

    async def _read(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest], outbox: Outbox
    ) -> None:
        async for request in requests:
            if request.HasField("hello"):  # of no instance: it sends nothing but tokens
                await outbox.put(
                    scheduler_pb2.SessionResponse(greeting=scheduler_pb2.SessionGreeting())
                )
            elif request.HasField("submit"):
                self._handles[outbox].append(request.submit.handle)
                if sum(map(len, self._handles.values())) == self._num_streams:
                    streams = {box: handles for box, handles in self._handles.items() if handles}
                    self._handles = {box: [] for box in self._handles}
                    self._playing = asyncio.create_task(self._play(streams))

    async def _play(self, streams: dict[Outbox, list[int]]) -> None:
        say({"submitted_s": time.monotonic()})
        await asyncio.sleep(self._pause_s)  # the parent reads counters in this pause
        sent_s = []
        due_s = time.monotonic()
        packed = {box: columns.pack(handles, columns.UINT32) for box, handles in streams.items()}
        for token_id in self._token_ids:
            await asyncio.sleep(due_s - time.monotonic())
            sent_s.append(time.monotonic())
            due_s += self._step_s
            for outbox, column in packed.items():
                token_ids = columns.pack([token_id] * len(streams[outbox]))
                await outbox.put(scheduler_pb2.SessionResponse(handles=column, token_ids=token_ids))
        usage = types_pb2.Usage(prompt_tokens=7, completion_tokens=len(self._token_ids))
        reason = types_pb2.FINISH_REASON_LENGTH
        for outbox, handles in streams.items():
            ends = [scheduler_pb2.Finished(handle=h, reason=reason, usage=usage) for h in handles]
            await outbox.put(scheduler_pb2.SessionResponse(finished=ends))
        say({"sent_s": sent_s})


async def run_source(args: argparse.Namespace) -> None:
    """Serves until it is killed; prints when the streams are open, and the time of each step."""
    tokenizer = Tokenizer.from_folder(args.model)
    model = types_pb2.ModelInfo(
        model=MODEL_NAME, architecture="LlamaForCausalLM", vocab_size=tokenizer.vocab_size,
        max_model_len=1 << 20, eos_token_ids=[0], tokenizer_sha256=tokenizer.sha256,
        dtype="float32",
    )  # fmt: skip
    # type: the calls that it lacks are answered with UNIMPLEMENTED.
    source = TokenSource(  # type: ignore[abstract]
        model, script(tokenizer, args.tokens), args.streams, args.rate
    )
    server = grpc.aio.server(options=SERVER_OPTIONS)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(source, server)
    bind(server, f"127.0.0.1:{args.port}", "the source")
    await server.start()
    await server.wait_for_termination()


class Reading:
    """Messages and bytes of one stream, and their times if it is timed."""

    def __init__(self, *, is_timed: bool) -> None:
        self._is_timed = is_timed
        self.num_messages = 0
        self.first_s = 0.0
        self.pieces: list[tuple[float, bytes]] = []

    def note(self, data: bytes, num_messages: int) -> None:
        """Counts received bytes."""
        now_s = time.monotonic()
        self.first_s = self.first_s or now_s
        self.num_messages += num_messages
        if self._is_timed:
            self.pieces.append((now_s, data))


async def read_sse(port: int, reading: Reading, num_tokens: int) -> None:
    """Reads one completion over HTTP/1.1."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    tail = b""
    while not tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"the gateway hung up after {tail!r}")
        reading.note(data, data.count(b"data: "))
        tail = (tail + data)[-64:]
    writer.close()


async def read_grpc(
    port: int, readings: list[Reading], num_tokens: int, num_connections: int
) -> None:
    """Reads one completion over gRPC per reading, all at once."""
    request = inference_pb2.GenerateStreamRequest(prompt=inference_pb2.Prompt(text=PROMPT))
    request.options.sampling.max_tokens = num_tokens
    notes = [partial(reading.note, num_messages=1) for reading in readings]
    shares = [share for i in range(num_connections) if (share := notes[i::num_connections])]
    body = request.SerializeToString()
    await asyncio.gather(*(read_all(port, GENERATE_STREAM, body, share) for share in shares))


def tokens_over_time(api: str, reading: Reading, tokenizer: Tokenizer) -> list[tuple[float, int]]:
    """(time, tokens so far) of a stream; SSE has text only, so its length is used."""
    found, num_tokens, text, waiting = [], 0, "", b""
    decode = tokenizer.detokenizer(skip_special_tokens=True)
    lengths = np.cumsum([len(decode.push([t])) for t in script(tokenizer, 1 << 14)])
    for at_s, data in reading.pieces:
        if api == "grpc":
            delta = inference_pb2.GenerateStreamResponse.FromString(data).delta
            num_tokens += len(delta.token_ids)
        else:
            *events, waiting = (waiting + data).split(b"\n\n")
            for event in events:
                payload = event[event.find(b"{") :]
                if payload.startswith(b"{"):
                    text += json.loads(payload)["choices"][0]["text"]
            num_tokens = int(np.searchsorted(lengths, len(text), side="right"))
        found.append((at_s, num_tokens))
    return found


async def run_readers(args: argparse.Namespace) -> None:
    """Reads all streams to their ends, repeatedly; prints the results."""
    tokenizer = Tokenizer.from_folder(args.model)
    for _ in range(args.repeat):
        readings = [Reading(is_timed=i % SAMPLE_EVERY == 0) for i in range(args.streams)]
        began_s = time.monotonic()
        if args.api == "sse":
            await asyncio.gather(*(read_sse(args.port, r, args.tokens) for r in readings))
        else:
            await read_grpc(args.port, readings, args.tokens, args.connections)
        ended_s = time.monotonic()
        timed = [tokens_over_time(args.api, r, tokenizer) for r in readings if r.pieces]
        say(
            {
                "began_s": began_s,
                "ended_s": ended_s,
                "first_s": readings[0].first_s,
                "num_messages": sum(reading.num_messages for reading in readings),
                "timed": timed,
            }
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    roles = parser.add_subparsers(dest="role", required=True)
    source, readers = roles.add_parser("source"), roles.add_parser("readers")
    for role in (source, readers):
        role.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
        role.add_argument("--port", type=int, required=True)
        role.add_argument("--streams", type=int, required=True)
        role.add_argument("--tokens", type=int, required=True, help="per stream")
    readers.add_argument("--repeat", type=int, default=1)
    readers.add_argument("--connections", type=int, default=1, help="over gRPC; SSE: one a stream")
    source.add_argument("--rate", type=float, default=0.0, help="tokens/s of all; 0: no limit")
    readers.add_argument("--api", choices=("sse", "grpc"), required=True)
    args = parser.parse_args(arguments)
    uvloop.run(run_source(args) if args.role == "source" else run_readers(args))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
