"""Time that scheduler and wire add to a step, measured with a fake worker's process.

    python -m bench.step_overhead [--steps 1500] [--step-time 0.002] [--json results.jsonl]

256 requests decode together while every step of the worker takes 2 ms; what lies between two
ends of steps beyond that is what is added. Measured once for each depth of look-ahead without
grants, and with grants; both processes and the client share this machine's cores. The first line
is the fake worker's own lateness: the same steps without a scheduler, a wire or another process.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np

from bench.harness.deployment import attached, own_pid
from bench.harness.records import new_parser
from bench.harness.services import free_ports, hardware
from bench.scheduler_core import commit
from pagewire.cli.launcher.services import ServiceSpec
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel
from simulator.workers.loopback import Device, DeviceStep, wake_on_time
from wire.columns import pack

PROMPT_TOKENS = 64
BLOCK_SIZE = 16
UNSETTLED = 50  # steps left out at either end


@dataclass(frozen=True, slots=True)
class Mode:
    """The look-ahead and grants of a scheduler."""

    name: str
    lookahead: int
    max_grant: int


MODES = (
    Mode("look-ahead 0", 0, 0),
    Mode("look-ahead 1", 1, 0),
    Mode("look-ahead 2", 2, 0),
    Mode("grants of 8", 1, 8),
)


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """One line of the table. Up is from the scheduler to the worker."""

    mode: str
    num_steps: int
    median_ms: float
    p90_ms: float
    bytes_up: float
    bytes_down: float
    scheduler_cpu_us: float


@dataclass(frozen=True, slots=True)
class Processes:
    """A scheduler, and the file for its worker's steps."""

    scheduler_pid: int
    address: str
    records: Path


def alone(options: argparse.Namespace) -> OverheadResult:
    """The fake worker's steps without a scheduler."""
    records: list[DeviceStep] = []
    blocks = range(1, 2 + (PROMPT_TOKENS + options.steps) // BLOCK_SIZE)
    model = FakeModel(max_num_seqs=options.requests, block_size=BLOCK_SIZE)
    device = Device(model, StepTime(options.step_time, 0, 0), records.append)
    new = [
        worker_pb2.NewSequence(slot=slot, token_ids=pack([1]), block_ids=pack([*blocks]))
        for slot in range(options.requests)
    ]
    rows = pack([*range(options.requests)])
    wake_on_time()
    device.run(worker_pb2.SchedulerOutput(reset=True, new_sequences=new, slots=rows), 0)
    for step_id in range(1, min(options.steps, 500)):
        device.run(worker_pb2.SchedulerOutput(step_id=step_id, same_rows=True), 0)
    return to_result("no scheduler", [asdict(r) for r in records[UNSETTLED:]], options.step_time, 0)


def measure(mode: Mode, options: argparse.Namespace) -> OverheadResult:
    """Runs the requests once in a mode."""
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as folder:
        with running(mode, options, Path(folder)) as processes:
            cpu_us = asyncio.run(drive(processes, options))
        lines = processes.records.read_text(encoding="utf-8").splitlines()
    steps = settled([json.loads(line) for line in lines], options.requests)
    return to_result(mode.name, steps, options.step_time, cpu_us)


def to_result(
    mode: str, steps: list[dict[str, float]], step_time_s: float, cpu_us: float
) -> OverheadResult:
    """The line for consecutive steps."""
    ended_s = [step["ended_s"] for step in steps]
    added_ms = [(later - before - step_time_s) * 1e3 for before, later in pairwise(ended_s)]
    return OverheadResult(
        mode=mode,
        num_steps=len(steps),
        median_ms=round(float(np.median(added_ms)), 4),
        p90_ms=round(float(np.percentile(added_ms, 90)), 4),
        bytes_up=round(float(np.mean([step["bytes_in"] for step in steps])), 1),
        bytes_down=round(float(np.mean([step["bytes_out"] for step in steps])), 1),
        scheduler_cpu_us=round(cpu_us, 1),
    )


def settled(steps: list[dict[str, float]], num_requests: int) -> list[dict[str, float]]:
    """The steps in which all requests decode, without the first and last ones."""
    full = [step for step in steps if step["num_rows"] == step["num_tokens"] == num_requests]
    kept = full[UNSETTLED:-UNSETTLED]
    ids = [step["step_id"] for step in kept]
    if len(kept) < 2 * UNSETTLED or ids != list(range(int(ids[0]), int(ids[0]) + len(ids))):
        raise RuntimeError(f"only {len(kept)} steps in a row had all {num_requests} requests")
    return kept


@contextlib.contextmanager
def running(mode: Mode, options: argparse.Namespace, folder: Path) -> Iterator[Processes]:
    """Both processes, until the requests have ended; then the worker writes its steps."""
    ports, records = free_ports(), folder / "steps.jsonl"
    num_blocks = options.requests * (-(-(PROMPT_TOKENS + options.steps) // BLOCK_SIZE) + 2)
    limits = [*("--max-num-seqs", options.requests), *("--max-num-batched-tokens", 8192)]
    worker = [
        *("--port", ports.worker, "--step-time", options.step_time, "--record", records),
        *("--num-blocks", num_blocks, "--block-size", BLOCK_SIZE),
        *("--max-model-len", 2 * PROMPT_TOKENS + options.steps),
    ]
    scheduler = [
        *("--worker", f"127.0.0.1:{ports.worker}", "--port", ports.scheduler),
        *("--lookahead", mode.lookahead, "--max-grant", mode.max_grant),
    ]
    address = f"127.0.0.1:{ports.scheduler}"
    specs = [
        ServiceSpec(name, module, tuple(map(str, [*own, *limits])), address)
        for name, module, own in (
            ("worker", "simulator", worker),
            ("scheduler", "scheduler_svc", scheduler),
        )
    ]
    with attached(specs, address) as services:
        yield Processes(own_pid(services["scheduler"]), address, records)


async def drive(processes: Processes, options: argparse.Namespace) -> float:
    """Runs all requests to their end; returns the scheduler's CPU microseconds per step."""
    done, num_left = asyncio.Event(), options.requests
    num_messages = 0
    marks: list[tuple[float, float]] = []  # messages per request, CPU seconds

    async def frames() -> AsyncIterator[scheduler_pb2.SessionRequest]:
        for number in range(options.requests):
            yield scheduler_pb2.SessionRequest(submit=to_submit(number, options.steps))
        await done.wait()

    async with grpc.aio.insecure_channel(processes.address) as channel:
        async for message in scheduler_pb2_grpc.SchedulerServiceStub(channel).Session(frames()):
            # One message per step, or for several after a delay.
            num_messages += len(message.handles) // 4
            part = num_messages / (options.requests * options.steps)
            if len(marks) < (part > 0.2) + (part > 0.8):
                marks.append((num_messages / options.requests, cpu_s(processes.scheduler_pid)))
            num_left -= len(message.finished)
            if not num_left:
                done.set()
    (first, from_s), (last, to_s) = marks
    return (to_s - from_s) / (last - first) * 1e6


def to_submit(number: int, num_steps: int) -> scheduler_pb2.Submit:
    """A request with a prompt of its own."""
    prompt = [1 + (number * 7919 + position) % 30_000 for position in range(PROMPT_TOKENS)]
    return scheduler_pb2.Submit(
        handle=number,
        request_id=f"r{number}",
        prompt_token_ids=pack(prompt),
        sampling=types_pb2.SamplingParams(max_tokens=num_steps, seed=number, ignore_eos=True),
    )


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; exits with a usage message on an invalid one."""
    parser = new_parser("bench.step_overhead", __doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500, help="output tokens of each request")
    parser.add_argument("--step-time", type=float, default=0.002, help="seconds of a step")
    parser.add_argument("--json", type=Path, help="append one JSON object per mode to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    machine = {
        "hardware": hardware(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "numpy": np.__version__,
        "commit": commit(),
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{options.requests} requests, steps of {options.step_time * 1e3:g} ms; per step:")
    print(
        f"{'':14}{'added ms, median':>18}{'p90':>9}{'bytes up':>11}{'down':>9}"
        f"{'scheduler CPU us':>18}"
    )
    for mode in (None, *MODES):
        result = alone(options) if mode is None else measure(mode, options)
        print(
            f"{result.mode:14}{result.median_ms:18.3f}{result.p90_ms:9.3f}{result.bytes_up:11.1f}"
            f"{result.bytes_down:9.1f}{result.scheduler_cpu_us:18.1f}",
            flush=True,
        )
        if options.json:
            with options.json.open("a", encoding="utf-8") as lines:
                given = {"requests": options.requests, "step_time_s": options.step_time}
                lines.write(json.dumps(machine | given | asdict(result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
