"""What the live stream costs the server: CPU of gateway and scheduler with and without viewers.

    python -m bench.page.cost [--streams 256] [--blocks 100000] [--viewers 1] [--rounds 6]

First the work for one frame of as many requests that decode, as CPU time of a thread, without gRPC
and HTTP. Then all of it: a scheduler and a gateway as processes, and a fake worker that answers a
step each 50 ms, so that every frame has another state. While all streams decode, windows with and
without viewers alternate. Printed is the median of the differences between neighbours, in percent
of a core, of each service and of both together.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.harness.services import ROOT, commit, hardware
from bench.scheduler_core import BLOCK_SIZE, make_scheduler
from bench.scrape import cpu_s
from default_model.folder import ensure
from gateway.page.feed import INTERVAL_S
from gateway.page.frames import RequestFacts, event, frame_body
from pagewire.cli.launcher.services import LOOPBACK, free_ports
from pagewire.v1 import live_pb2, scheduler_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.live.activity import RequestWatch
from scheduler_svc.live.service import DEFAULT_CELLS, DEFAULT_REQUESTS
from simulator.workers.fake_worker import FakeModel, FakeWorker, start

STEP_S = 0.05
WINDOW_S = 10.0
SETTLE_S = 1.0
VOCAB_SIZE = 49152  # of the default model's tokenizer
MAX_TOKENS = 7000
GROUP = scheduler_pb2.WorkerGroupStatus(address="a", ready=True)


@dataclass(frozen=True, slots=True)
class Window:
    """CPU of both services over some seconds, in percent of a core."""

    scheduler: float
    gateway: float
    num_bytes: int  # that viewers got
    num_frames: int

    @property
    def both(self) -> float:
        return self.scheduler + self.gateway


class Reader:
    """Reads an answer and counts; keeps nothing."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_frames = 0

    async def run(self, port: int, request: bytes) -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=1 << 22)
        try:
            writer.write(request)
            while data := await reader.read(1 << 20):
                self.num_bytes += len(data)
                self.num_frames += data.count(b"event: frame")
        finally:
            writer.close()


def get(path: str) -> bytes:
    """A request without a body."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def post(path: str, body: object) -> bytes:
    """A request with one."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def completion(index: int, max_tokens: int = MAX_TOKENS) -> bytes:
    """A stream that goes on longer than the measurement."""
    words = f"{index} " + "one two three four " * 20
    body = {"prompt": words, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return post("/v1/completions", body)


async def until_ready(port: int) -> None:
    """Waits for the gateway."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            writer.write(get("/ready"))
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)


async def window(pids: Sequence[int], port: int, num_viewers: int) -> Window:
    """Measures with so many viewers, from when they are settled."""
    readers = [Reader() for _ in range(num_viewers)]
    tasks = [asyncio.create_task(reader.run(port, get("/v1/live"))) for reader in readers]
    await asyncio.sleep(SETTLE_S)
    began_s, before = time.monotonic(), [cpu_s(pid) for pid in pids]
    sizes = [(reader.num_bytes, reader.num_frames) for reader in readers]
    await asyncio.sleep(WINDOW_S)
    wall_s = time.monotonic() - began_s
    used = [100 * (cpu_s(pid) - was) / wall_s for pid, was in zip(pids, before, strict=True)]
    grown = [
        (reader.num_bytes - size, reader.num_frames - frames)
        for reader, (size, frames) in zip(readers, sizes, strict=True)
    ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Window(used[0], used[1], sum(g[0] for g in grown), sum(g[1] for g in grown))


async def measure(options: argparse.Namespace, stack: ExitStack) -> None:
    """Starts everything and prints the result."""
    model = FakeModel(options.blocks, max_num_seqs=options.streams, vocab_size=VOCAB_SIZE)
    worker = FakeWorker(model, StepTime(STEP_S))  # type: ignore[abstract]
    server, worker_port = await start(worker, f"{LOOPBACK}:0")
    scheduler_port, http_port, grpc_port = free_ports(3)
    commands = (
        ["scheduler_svc", "--worker", f"{LOOPBACK}:{worker_port}", "--port", str(scheduler_port)],
        [
            *("gateway", "--model", str(ensure()), "--scheduler", f"{LOOPBACK}:{scheduler_port}"),
            *("--http-port", str(http_port), "--grpc-port", str(grpc_port)),
            *("--max-streams-per-client", str(options.streams + 8)),
        ],
    )
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pids = []
    for words in commands:
        log = stack.enter_context((logs / words[0]).open("wb"))
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        pids.append(process.pid)
    await until_ready(http_port)
    streams = [Reader() for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(reader.run(http_port, completion(index)))
        for index, reader in enumerate(streams)
    ]
    while min(reader.num_bytes for reader in streams) < 2000:
        await asyncio.sleep(0.2)
    pairs = []
    for _ in range(options.rounds):
        without = await window(pids, http_port, 0)
        pairs.append((without, await window(pids, http_port, options.viewers)))
    report(options, pairs)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(None)


def work_per_frame(num_streams: int, num_blocks: int) -> tuple[float, float]:
    """Microseconds that the scheduler and the gateway need to make one frame."""
    # So long a context that the pool has about as many blocks as are wanted.
    context = max(num_blocks // num_streams * BLOCK_SIZE - 4096 - BLOCK_SIZE, BLOCK_SIZE)
    core, watch = make_scheduler(num_streams, context, 0), RequestWatch(DEFAULT_REQUESTS)

    def snapshot() -> bytes:
        shares = core.view.block_shares(DEFAULT_CELLS)
        blocks = live_pb2.BlockMap(num_blocks=shares.num_blocks, cells=shares.cells.tobytes())
        group = live_pb2.GroupActivity(address="a", blocks=blocks, requests=watch.look(core))
        status = scheduler_pb2.GetStatusResponse(groups=[GROUP])
        return live_pb2.WatchResponse(status=status, groups=[group]).SerializeToString()

    facts, first = RequestFacts(), snapshot()
    facts.take(live_pb2.WatchResponse.FromString(first))
    data = snapshot()

    def frame() -> bytes:
        message = live_pb2.WatchResponse.FromString(data)
        return facts.take(message) + event("frame", frame_body(message))

    return cpu_us(snapshot), cpu_us(frame)


def cpu_us(call: Callable[[], object]) -> float:
    """The median of the CPU time of a call."""
    times = []
    for _ in range(300):
        began_s = time.thread_time()
        call()
        times.append(1e6 * (time.thread_time() - began_s))
    return statistics.median(times)


def report(options: argparse.Namespace, pairs: list[tuple[Window, Window]]) -> None:
    """Prints medians."""
    middle = statistics.median
    frames = sum(seen.num_frames for _, seen in pairs) / (len(pairs) * options.viewers * WINDOW_S)
    size = sum(w.num_bytes for _, w in pairs) / max(sum(w.num_frames for _, w in pairs), 1)
    print(
        f"{options.streams} streams, {options.blocks} blocks, {options.viewers} viewer(s), "
        f"{frames:.1f} frames/s of {size / 1024:.1f} KiB, {options.rounds} pairs of {WINDOW_S:g} s"
    )
    for name in ("scheduler", "gateway", "both"):
        off = middle(getattr(without, name) for without, _ in pairs)
        cost = middle(getattr(seen, name) - getattr(without, name) for without, seen in pairs)
        print(f"{name}: {off:.1f} % of a core without, {cost:+.2f} % for the stream")


def main() -> None:
    """Measures once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    print(f"{hardware()}, commit {commit()}, load {os.getloadavg()[0]:.1f}")
    scheduler_us, gateway_us = work_per_frame(options.streams, options.blocks)
    share = 1e2 * (scheduler_us + gateway_us) / 1e6 / INTERVAL_S
    print(f"a frame: scheduler {scheduler_us:.0f} us, gateway {gateway_us:.0f} us: {share:.2f} %")
    with ExitStack() as stack:
        asyncio.run(measure(options, stack))


if __name__ == "__main__":
    main()
