"""Accuracy of `pagewire simulate`: the same workload, simulated and served for real.

    python -m bench.simulation [--seconds 20] [--json results.jsonl]

For real means a scheduler and a fake worker on the real wire; clients arrive at the same moments.
The step times are measured in a run of their own at half the load, as a user would: what the model
says the fake worker takes, this machine exceeds. What a simulation leaves out is gRPC, event loops,
and whatever else the machine does.
"""

import asyncio
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.harness.records import new_parser
from bench.overload import NUM_SLOTS, STEP_TIME, serving
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.measures import summarize
from simulator.capacity.virtual_server import VirtualServer
from simulator.capacity.workload import Arrival, Prompts, Range, Synthetic
from simulator.workers.fake_worker import FakeModel

LOADS = (0.5, 0.8, 0.95, 1.2)
MEAN_SERVICE_S = 0.36  # of a request with a slot of its own, at the lengths below
MODEL = FakeModel()


@dataclass(frozen=True, slots=True)
class Line:
    """One number, measured and simulated."""

    load: float
    what: str
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.measured - 1


def workload(load: float, seconds: float) -> list[Arrival]:
    """Arrivals for `seconds` at a fraction of the worker's capacity."""
    rate = load * NUM_SLOTS / MEAN_SERVICE_S
    return Synthetic(
        rate,
        round(rate * seconds),
        prompt_tokens=Range(32, 256),
        output_tokens=Range(4, 28),
        seed=int(100 * load),
    ).arrivals()


def simulated(arrivals: Sequence[Arrival], step_time: StepTime) -> list[float]:
    """Requests per second, and percentiles of the latencies."""
    config = SchedulerConfig(
        num_blocks=MODEL.num_blocks,
        block_size=MODEL.block_size,
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=512,
        max_model_len=MODEL.max_model_len,
        vocab_size=MODEL.vocab_size,
        enable_prefix_caching=False,
    )
    told = summarize(VirtualServer(config, step_time, lookahead=1, wire_s=0.0003).serve(arrivals))
    return [
        told.requests_per_s,
        *(told.ttft.p50_s, told.ttft.p90_s, told.ttft.p99_s),
        *(told.e2e.p50_s, told.e2e.p99_s),
    ]


async def measured(arrivals: Sequence[Arrival]) -> tuple[list[float], StepTime]:
    """The same from real streams, and the step times measured by the scheduler."""
    ttft_s: list[float] = []
    e2e_s: list[float] = []
    prompts = Prompts(MODEL.vocab_size)

    async def one(stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub", arrival: Arrival) -> float:
        prompt = prompts.of(arrival)
        await asyncio.sleep(max(began_s + arrival.arrival_s - time.perf_counter(), 0))
        sent_s, first_s = time.perf_counter(), None
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id=f"r{arrival.arrival_s}",
            prompt_token_ids=prompt.tolist(),
            sampling=types_pb2.SamplingParams(
                max_tokens=arrival.output_tokens, seed=1, ignore_eos=True
            ),
        )
        async for response in stub.Generate(request):
            if first_s is None and response.token_ids:
                first_s = time.perf_counter()
        assert first_s is not None
        ttft_s.append(first_s - sent_s)
        e2e_s.append(time.perf_counter() - sent_s)
        return time.perf_counter()

    async with serving() as (stub, engine):
        began_s = time.perf_counter() + 0.2
        ends_s = await asyncio.gather(*(one(stub, arrival) for arrival in arrivals))
        step_time = engine.groups[0].pace.step_time
    assert step_time is not None

    def percentiles(values: list[float], *which: int) -> list[float]:
        found: list[float] = np.percentile(values, which, method="inverted_cdf").tolist()
        return found

    rate = len(arrivals) / (max(ends_s) - began_s)
    values = [rate, *percentiles(ttft_s, 50, 90, 99), *percentiles(e2e_s, 50, 99)]
    return values, step_time


NAMES = ("requests/s", "TTFT p50, s", "TTFT p90, s", "TTFT p99, s", "E2E p50, s", "E2E p99, s")


async def main() -> None:
    parser = new_parser("bench.simulation", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals per load")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object per line to FILE")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {"commit": commit, "cpus": os.cpu_count(), "machine": platform.processor()}
    print(" ".join(f"{key} {value}" for key, value in about.items()))
    _, step_time = await measured(workload(0.5, options.seconds))
    print(f"step times nominally {STEP_TIME}\n{'':11}as measured {step_time}")
    print(f"{'load':>5}  {'':12}{'simulated':>11}{'measured':>11}{'error':>9}")
    for load in LOADS:
        arrivals = workload(load, options.seconds)
        really, _ = await measured(arrivals)
        for what, foretold, real in zip(NAMES, simulated(arrivals, step_time), really, strict=True):
            line = Line(load, what, foretold, real)
            print(
                f"{load:5.2f}  {what:12}{line.simulated:11.3f}{line.measured:11.3f}"
                f"{100 * line.error:8.1f}%",
                flush=True,
            )
            if options.json:
                with open(options.json, "a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(line) | about) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
