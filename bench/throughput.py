"""Scheduler and worker as processes, driven over gRPC: tokens in, tokens out, whole run timed.

    python -m bench.throughput --shape qwen3-0.6b --steps 1 8 32 128 256 --json throughput.json

The workload is the one other small engines publish: 256 requests, prompts and outputs uniform in
100..1024 from Python's generator with seed 0, all submitted at once, 133,966 output tokens.
`--steps` adds the time of one decode step by batch, as the client sees it, at a mean context of
about 576.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch

from bench import checkpoints
from bench.product import ROOT, free_ports, hardware
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from rpc.columns import UINT32, pack, unpack

START_TIMEOUT_S = 240.0
VOCABULARY = 10_000  # prompt tokens are drawn below it
PROMPT_OF_STEPS = 492  # mid-way between the settled start and the end: a context of 576
OUTPUT_OF_STEPS = 160
SETTLED = 8  # tokens that every request must have before steps are timed


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload."""

    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Run:
    """What a client saw."""

    started_s: float
    num_tokens: list[int]  # per request
    times_s: list[float] = field(default_factory=list)  # of each message that brought tokens
    settled: tuple[int, float] | None = None  # message and time at which all were decoding
    first_end: tuple[int, float] | None = None
    ended_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(self.num_tokens) / (self.ended_s - self.started_s)

    @property
    def step_ms(self) -> float:
        """Mean time of the messages between the last start and the first end."""
        assert self.settled is not None and self.first_end is not None
        (first, from_s), (last, to_s) = self.settled, self.first_end
        return (to_s - from_s) / (last - first) * 1e3


def workload(seed: int, num_requests: int) -> list[Request]:
    """Prompts, then outputs, uniform in 100..1024."""
    draw = random.Random(seed).randint
    prompts = [[draw(0, VOCABULARY) for _ in range(draw(100, 1024))] for _ in range(num_requests)]
    return [Request(prompt, draw(100, 1024)) for prompt in prompts]


def alike(seed: int, batch: int) -> list[Request]:
    """Requests that decode side by side."""
    draw = random.Random(seed).randint
    prompts = [[draw(0, VOCABULARY) for _ in range(PROMPT_OF_STEPS)] for _ in range(batch)]
    return [Request(prompt, OUTPUT_OF_STEPS) for prompt in prompts]


async def drive(address: str, requests: Sequence[Request], temperature: float, tag: str) -> Run:
    """Submits everything at once over one Session and reads until all have ended."""
    sampling = [
        types_pb2.SamplingParams(
            temperature=temperature, seed=index, max_tokens=request.max_tokens, ignore_eos=True
        )
        for index, request in enumerate(requests)
    ]
    submits = [
        scheduler_pb2.SessionRequest(
            submit=scheduler_pb2.Submit(
                handle=index,
                request_id=f"{tag}-{index}",
                prompt_token_ids=pack(request.prompt),
                sampling=sampling[index],
            )
        )
        for index, request in enumerate(requests)
    ]
    done = asyncio.Event()

    async def frames() -> AsyncIterator[scheduler_pb2.SessionRequest]:
        for submit in submits:
            yield submit
        await done.wait()

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        run = Run(time.perf_counter(), [0] * len(requests))
        num_left = len(requests)
        async for message in scheduler_pb2_grpc.SchedulerServiceStub(channel).Session(frames()):
            now_s = time.perf_counter()
            _note(run, message, now_s)
            for end in message.finished:
                if end.reason != types_pb2.FINISH_REASON_LENGTH:
                    raise RuntimeError(f"request {end.handle} ended early: {end.message}")
            num_left -= len(message.finished)
            if not num_left:
                run.ended_s = now_s
                done.set()
    if run.num_tokens != [request.max_tokens for request in requests]:
        raise RuntimeError("some request did not get all its tokens")
    return run


def _note(run: Run, message: scheduler_pb2.SessionResponse, now_s: float) -> None:
    handles = unpack(message.handles, UINT32).tolist()
    for handle in handles:
        run.num_tokens[handle] += 1
    if handles:
        run.times_s.append(now_s)
    if run.settled is None and min(run.num_tokens) >= SETTLED:
        run.settled = (len(run.times_s), now_s)
    if message.finished and run.first_end is None:
        run.first_end = (len(run.times_s), now_s)


@contextlib.contextmanager
def serving(
    model: Path, worker_options: Sequence[str], scheduler_options: Sequence[str]
) -> Iterator[str]:
    """A worker and a scheduler that serve the model; yields the scheduler's address."""
    ports = free_ports()
    commands = {
        "worker_svc": ["--model", str(model), "--port", str(ports.worker), *worker_options],
        "scheduler_svc": [
            *("--worker", f"127.0.0.1:{ports.worker}", "--port", str(ports.scheduler)),
            *scheduler_options,
        ],
    }
    with (
        tempfile.TemporaryDirectory(prefix="pagewire-bench-") as logs,
        contextlib.ExitStack() as on,
    ):
        children = []
        for module, options in commands.items():
            log = on.enter_context((Path(logs) / module).open("wb"))
            child = subprocess.Popen(
                [sys.executable, "-m", module, *options], cwd=ROOT, stdout=log, stderr=log
            )
            on.callback(_stop, child)
            children.append((child, Path(logs) / module))
        address = f"127.0.0.1:{ports.scheduler}"
        _wait_until_ready(address, children)
        yield address


def _stop(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _wait_until_ready(
    address: str, children: Sequence[tuple["subprocess.Popen[bytes]", Path]]
) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while time.monotonic() < deadline_s:
            for child, log in children:
                if child.poll() is not None:
                    raise RuntimeError(f"{log.name} ended:\n{log.read_text(errors='replace')}")
            with contextlib.suppress(grpc.RpcError):
                if stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=5).ready:
                    return
            time.sleep(0.2)
    raise RuntimeError(f"nothing is served after {START_TIMEOUT_S:.0f} s")


async def measure(address: str, options: argparse.Namespace) -> dict[str, object]:
    """Warms up, then runs what was asked for."""
    await drive(address, workload(1, 8), options.temperature, "warm")
    steps = {}
    for batch in options.steps:
        run = await drive(address, alike(batch, batch), options.temperature, f"steps-{batch}")
        steps[batch] = round(run.step_ms, 3)
        print(f"batch {batch:4}: {steps[batch]:.3f} ms a step")
    rates = []
    for index in range(options.runs):
        requests = workload(2 * index, options.num_requests)
        run = await drive(address, requests, options.temperature, f"run-{index}")
        rates.append(round(run.tokens_per_s))
        print(
            f"{sum(run.num_tokens)} tokens in {run.ended_s - run.started_s:.2f} s: "
            f"{rates[-1]} tokens/s"
        )
    return {"step_ms": steps, "tokens_per_s": rates}


def environment() -> dict[str, object]:
    """Everything a reader needs to believe the numbers or repeat them."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": hardware(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
        "python": platform.python_version(),
        "commit": checkpoints.tree(),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.throughput", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=checkpoints.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--runs", type=int, default=2, help="how often; seeds 0, 2, 4, ...")
    parser.add_argument(
        "--steps", type=int, nargs="*", default=[], help="batches to time a step of"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--lookahead", type=int, default=1, help="steps planned ahead: 0, 1, 2")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, default=[], help="worker options")
    parser.add_argument("--json", type=Path, help="write results and environment here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as folder:
        model = checkpoints.write(Path(folder), options.shape)
        scheduling = [
            *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
            *("--lookahead", str(options.lookahead)),
        ]
        with serving(model, options.worker, scheduling) as address:
            results = asyncio.run(measure(address, options))
    if options.json is not None:
        values = {k: v for k, v in vars(options).items() if k != "json"}
        everything = {"options": values, "environment": environment(), "results": results}
        options.json.write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
