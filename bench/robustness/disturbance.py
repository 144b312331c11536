"""The gaps between tokens of running streams while hostile requests arrive.

Starts the three services, streams from them at once, and sends each hostile request several times
while they decode. `p99` is the gap that 99 of 100 stay below; `adds` is what the request adds to
the largest gap, in medians of streams that are alone. A prompt is computed in steps that the
streams share: `chunk` is the longest of these, and `aside` what the request adds apart from it.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx

from bench.harness.services import commit, free_ports, hardware, launched, settings
from default_model.folder import ensure
from pagewire.cli.launcher import services
from pagewire.v1 import (
    debug_pb2,
    debug_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from pagewire.v1.types_pb2 import SamplingParams

PROMPT = "Hello " * 60
ALONE_S = 2.0
MIB = 1 << 20
NUM_UPLOADS = 60
Send = Callable[["Stubs"], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Stubs:
    """Clients of the running services."""

    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    scheduler: "scheduler_pb2_grpc.SchedulerServiceAsyncStub"
    http: httpx.AsyncClient
    http_port: int
    worker: "debug_pb2_grpc.DebugServiceAsyncStub"


@dataclass(slots=True)
class RunningStreams:
    """Streams that decode until they are told to stop, and when their tokens came."""

    arrivals_s: list[list[float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, product: Stubs, number: int) -> None:
        """Starts streams; each begins anew when it reaches its longest output."""
        for index in range(number):
            self.arrivals_s.append([])
            self.tasks.append(asyncio.create_task(self._follow(product, index)))

    async def _follow(self, product: Stubs, index: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=1_500, ignore_eos=True)
        request = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(text=f"{index}: {PROMPT}"),
            options=inference_pb2.GenerationOptions(sampling=sampling),
        )
        while True:
            self.arrivals_s[index].append(float("nan"))  # no gap spans two requests
            async for _ in product.inference.GenerateStream(request):
                self.arrivals_s[index].append(time.perf_counter())

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """The gaps of all streams that ended in this time."""
        gaps = []
        for arrivals in self.arrivals_s:
            for before, after in pairwise(arrivals):
                if begin_s <= after <= end_s and after - before == after - before:
                    gaps.append(after - before)
        return gaps


def many_properties(number: int, *, are_required: bool) -> dict[str, Any]:
    """A schema of an object with so many properties."""
    names = [f"f{i}" for i in range(number)]
    properties = {name: {"type": "string"} for name in names}
    if not are_required:
        return {"type": "object", "properties": properties}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def chained_rules(num_bytes: int) -> str:
    """A grammar of about so many bytes, each rule with the next at its end."""
    number = num_bytes // 15
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(number))
    return f'start: r0\n{rules}\nr{number}: "b"\n'


def one_message(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def chat(**fields: object) -> Send:
    """A chat completion over HTTP; the answer's status."""

    async def send(product: Stubs) -> str:
        body = {"messages": one_message("Hello"), "max_tokens": 40, **fields}
        answer = await product.http.post("/v1/chat/completions", json=body)
        return str(answer.status_code)

    return send


def schema(content: dict[str, Any]) -> Send:
    """A chat completion whose answer must follow a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": content}}
    return chat(response_format=form)


def straight(grammar: str) -> Send:
    """A grammar past the gateway; the answer's status."""

    async def send(product: Stubs) -> str:
        sampling = SamplingParams(temperature=0, max_tokens=40, grammar=grammar)
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            prompt_token_ids=[1, 2, 3], sampling=sampling
        )
        try:
            async for _ in product.scheduler.Generate(request):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    return send


def body(path: str, make: Callable[[], bytes]) -> Send:
    """A body written by hand, sent by a thread: its size does not hold the streams' client."""

    def post(port: int) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request("POST", path, make(), {"content-type": "application/json"})
            return str(connection.getresponse().status)
        finally:
            connection.close()

    async def send(product: Stubs) -> str:
        return await asyncio.to_thread(post, product.http_port)

    return send


def unfinished_uploads(num_bytes: int) -> Send:
    """Many bodies of which all but the last byte is sent; how many were let in."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {num_bytes + 1}\r\n\r\n"
    ).encode()

    def upload(port: int) -> str:
        num_whole = 0
        with contextlib.ExitStack() as stack:
            for _ in range(NUM_UPLOADS):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.settimeout(1.0)
                with contextlib.suppress(OSError):  # it may be refused, or not be read, meanwhile
                    client.sendall(head + b" " * num_bytes)
                    num_whole += 1
        return f"{num_whole} sent"

    async def send(product: Stubs) -> str:
        return await asyncio.to_thread(upload, product.http_port)

    return send


def large_bodies() -> dict[str, Send]:
    """Requests that cost the gateway most before it knows whom it serves, by name."""
    return {
        "15 million ids": body(
            "/v1/completions", lambda: b'{"prompt":[' + b"1," * 15_000_000 + b"1]}"
        ),
        "a million wrong elements": body(
            "/v1/completions", lambda: b'{"prompt":"x","stop":[' + b"1," * 1_000_000 + b"1]}"
        ),
        "31 MiB of escapes": body(
            "/v1/completions", lambda: b'{"prompt":"' + rb"\n" * (31 * MIB // 2) + b'"}'
        ),
        "/tokenize of 1 MiB": body(
            "/tokenize", lambda: json.dumps({"prompt": "ab 12 " * (MIB // 6)}).encode()
        ),
        "/detokenize of 260,000 ids": body(
            "/detokenize", lambda: json.dumps({"tokens": [5] * 260_000}).encode()
        ),
        f"{NUM_UPLOADS} unfinished uploads of 31 MiB": unfinished_uploads(31 * MIB),
    }


def hostile_requests(max_model_len: int) -> dict[str, Send]:
    """What is sent, by name."""
    ambiguous = 'start: e\ne: e e | /[a-z]/ | e "+" e\n'
    longest = "word " * (min(50_000, max_model_len) - 600)
    return {
        "nothing": chat(max_tokens=1),
        "a small schema": schema(many_properties(3, are_required=True)),
        "3,000 properties": schema(many_properties(3_000, are_required=False)),
        "1,500 required properties": schema(many_properties(1_500, are_required=True)),
        "a{999999}": chat(guided_regex="a{999999}"),
        "64 KB of chained rules": chat(guided_grammar=chained_rules(64_000)),
        "an ambiguous grammar": chat(guided_grammar=ambiguous, max_tokens=200),
        "128 KB of chained rules, past the gateway": straight(chained_rules(128_000)),
        "a{999999}, past the gateway": straight("start: /a{999999}/"),
        "a prompt of 1 MB, refused": chat(
            messages=[{"role": "user", "content": "word " * 200_000}]
        ),
        f"a prompt of {len(longest) // 5} words": chat(messages=one_message(longest), max_tokens=1),
        **large_bodies(),
    }


async def longest_chunk_s(product: Stubs, num_steps: int) -> float:
    """The longest of the worker's last steps that computed tokens of a prompt, in seconds."""
    request = debug_pb2.ListStepsRequest(limit=max(1, num_steps))
    steps = (await product.worker.ListSteps(request)).steps
    return max((step.duration_us / 1e6 for step in steps if step.num_prefill_rows), default=0.0)


async def newest_step(product: Stubs) -> int:
    """The number of the worker's last step."""
    steps = (await product.worker.ListSteps(debug_pb2.ListStepsRequest(limit=1))).steps
    return steps[0].step_id


async def alone_s(streams: RunningStreams) -> float:
    """The median gap of streams while nothing else is sent."""
    began_s = time.perf_counter()
    await asyncio.sleep(ALONE_S)
    return statistics.median(streams.gaps_s(began_s, time.perf_counter()))


async def measure(
    product: Stubs, name: str, send: Send, streams: RunningStreams, repeats: int
) -> None:
    """Sends one request again and again, and prints the gaps in the meantime."""
    median_s = await alone_s(streams)
    first_step, began_s = await newest_step(product), time.perf_counter()
    answers = []
    for _ in range(repeats):
        answers.append(await send(product))
        await asyncio.sleep(0.3)
    ended_s = time.perf_counter()
    gaps = sorted(streams.gaps_s(began_s, ended_s))
    chunk_s = await longest_chunk_s(product, await newest_step(product) - first_step)
    largest_s, p99_s = gaps[-1], gaps[len(gaps) * 99 // 100]
    print(
        f"{name:42}{answers[0]:>18}{(ended_s - began_s) / repeats - 0.3:8.2f}{median_s * 1e3:8.1f}"
        f"{statistics.median(gaps) * 1e3:9.1f}{p99_s * 1e3:8.1f}{largest_s * 1e3:9.1f}"
        f"{chunk_s * 1e3:8.1f}"
        f"{largest_s / median_s - 1:7.1f}{(largest_s - max(chunk_s, median_s)) / median_s:7.1f}",
        flush=True,
    )


async def run(ports: Any, args: argparse.Namespace) -> None:
    """Starts streams, and sends every hostile request."""
    limit = [("grpc.max_receive_message_length", 64 << 20)]
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.gateway_grpc}", options=limit) as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.scheduler}") as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{ports.worker}", options=limit) as worker,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.gateway_http}", timeout=1_800) as web,
    ):
        product = Stubs(
            inference_pb2_grpc.InferenceServiceStub(gateway),
            scheduler_pb2_grpc.SchedulerServiceStub(scheduler),
            web,
            ports.gateway_http,
            debug_pb2_grpc.DebugServiceStub(worker),
        )
        streams = RunningStreams()
        streams.start(product, args.streams)
        await chat(max_tokens=1)(product)  # the first one is slower than all others
        await asyncio.sleep(5)
        print(
            f"{'':42}{'answer':>18}{'s':>8}{'alone':>8}{'median':>9}{'p99':>8}{'largest':>9}"
            f"{'chunk':>8}"
            f"{'adds':>7}{'aside':>7}"
        )
        for name, send in hostile_requests(args.max_model_len).items():
            if args.only in name:
                await measure(product, name, send, streams, args.repeats)
        for task in streams.tasks:
            task.cancel()
        await asyncio.gather(*streams.tasks, return_exceptions=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: the default model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=2_048, help="of the model")
    parser.add_argument("--only", default="", help="requests whose name has this")
    parser.add_argument("--worker-option", action="append", default=[])
    parser.add_argument("--scheduler-option", action="append", default=[])
    args = parser.parse_args(arguments)
    ports = free_ports()
    specs = services.plan(
        settings(ports, args.worker_option, args.scheduler_option), args.model or ensure()
    )
    url = f"http://127.0.0.1:{ports.gateway_http}/ready"

    def is_ready() -> bool:
        try:
            return httpx.get(url).status_code == 200
        except httpx.HTTPError:
            return False

    print(f"{hardware()}, commit {commit()}, {args.streams} streams, milliseconds between tokens")
    with launched(specs, is_ready):
        asyncio.run(run(ports, args))


if __name__ == "__main__":
    main()
