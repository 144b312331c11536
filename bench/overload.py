"""The scheduler under overload: goodput, retries at the advised time, and fair shares.

    python -m bench.overload [--seconds 6] [--json results.jsonl]

Clients arrive at random (open loop, Poisson) at one to four times what the fake worker can serve,
over gRPC. Each wants its answer within a deadline. A refused client waits for the time in
RetryInfo and retries once, with the same request id.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from bench.harness.records import new_parser
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.config import ServiceConfig
from scheduler_svc.core import Policy
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from simulator.workers.fake_worker import FakeModel, FakeWorker, start
from wire.server import SERVER_OPTIONS, bind

NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, NUM_SLOTS = 64, 16, 8
STEP_TIME = StepTime(base_s=0.020, per_token_s=20e-6)
DEADLINE_S = 2.0
MAX_WAITING = 20
LOADS = (1.0, 2.0, 3.0, 4.0)


@dataclass(slots=True)
class Tally:
    """Results of the clients' requests."""

    num_sent: int = 0
    num_in_time: int = 0  # answered within the deadline, at the first or second attempt
    num_refused: int = 0  # at the first attempt
    num_retried_in_time: int = 0
    num_expired: int = 0
    latencies_s: list[float] = field(default_factory=list)
    answered_at_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdmissionOutcome:
    """One line of the first table."""

    admission: str
    load: float
    goodput_per_s: float
    p99_s: float
    refused: float  # fraction of those sent
    expired: float
    retries_in_time: float | None  # fraction of those that retried


@dataclass(frozen=True, slots=True)
class TenantShare:
    """One line of the second table."""

    policy: str
    light_per_s: float
    heavy_per_s: float
    jain: float


def config(worker_port: int, **options: object) -> ServiceConfig:
    """The scheduler's options, overridden by `options`."""
    return ServiceConfig(
        workers=(f"127.0.0.1:{worker_port}",),
        host="127.0.0.1",
        port=0,
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=0,
        enable_prefix_caching=False,
        lookahead=1,
        step_timeout_s=30.0,
        **options,  # type: ignore[arg-type]
    )


@asynccontextmanager
async def scheduler(
    **options: object,
) -> AsyncIterator["scheduler_pb2_grpc.SchedulerServiceAsyncStub"]:
    """A scheduler and its fake worker, on the real wire."""
    async with serving(**options) as (stub, _):
        yield stub


@asynccontextmanager
async def serving(
    **options: object,
) -> AsyncIterator[tuple["scheduler_pb2_grpc.SchedulerServiceAsyncStub", Engine]]:
    """The same, with the engine."""
    async with AsyncExitStack() as stack:
        # type: the calls that it lacks are answered with UNIMPLEMENTED.
        worker = FakeWorker(FakeModel(), STEP_TIME)  # type: ignore[abstract]
        worker_server, worker_port = await start(worker, "127.0.0.1:0")
        stack.push_async_callback(worker_server.stop, None)
        engine = Engine(config(worker_port, **options))
        server = grpc.aio.server(options=SERVER_OPTIONS)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerService(engine), server)
        port = bind(server, "127.0.0.1:0", "the scheduler")
        await server.start()
        stack.push_async_callback(server.stop, None)
        running = asyncio.create_task(engine.run())

        async def stop() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        stack.push_async_callback(stop)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        while not engine.is_ready:
            await asyncio.sleep(0.01)
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel), engine


class CountingClient:
    """Sends requests and counts their results."""

    def __init__(
        self, stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub", tenant: str = "", *, obeys: bool
    ) -> None:
        self._stub = stub
        self._tenant = tenant
        self._obeys = obeys
        self.tally = Tally()

    async def one(self, request_id: str) -> None:
        """Sends one request, and retries once when it is refused."""
        self.tally.num_sent += 1
        delay_s = await self._attempt(request_id)
        if delay_s is None:
            return
        self.tally.num_refused += 1
        if not self._obeys:
            return
        await asyncio.sleep(delay_s)
        await self._attempt(request_id, is_retry=True)

    async def _attempt(self, request_id: str, *, is_retry: bool = False) -> float | None:
        """Seconds to wait when it was refused; None when it was accepted."""
        began_s = time.monotonic()
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id=request_id,
            prompt_token_ids=range(1, NUM_PROMPT_TOKENS + 1),
            sampling=types_pb2.SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, seed=1),
            tenant=self._tenant,
        )
        try:
            async for _ in self._stub.Generate(request, timeout=DEADLINE_S):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.tally.num_expired += 1
                return None
            return retry_delay_s(error)
        now_s = time.monotonic()
        self.tally.num_in_time += 1
        self.tally.num_retried_in_time += is_retry
        self.tally.latencies_s.append(now_s - began_s)
        self.tally.answered_at_s.append(now_s)
        return None

    async def send(self, rate_per_s: float, seconds: float, seed: int) -> tuple[float, float]:
        """Sends arrivals for `seconds` and waits for all; returns when sending began and ended."""
        rng = random.Random(seed)
        tasks: list[asyncio.Task[None]] = []
        began_s = next_s = time.monotonic()
        while (next_s := next_s + rng.expovariate(rate_per_s)) < began_s + seconds:
            await asyncio.sleep(max(next_s - time.monotonic(), 0))
            tasks.append(asyncio.create_task(self.one(f"{self._tenant}{seed}-{len(tasks)}")))
        ended_s = time.monotonic()
        await asyncio.gather(*tasks)
        return began_s, ended_s


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    """The time in RetryInfo, in seconds; raises other errors."""
    status = rpc_status.from_call(error)
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or status is None:
        raise error
    info = RetryInfo()
    if not status.details[0].Unpack(info):
        raise error
    return float(info.retry_delay.ToTimedelta().total_seconds())


async def capacity_per_s(seconds: float) -> float:
    """Requests per second in a closed loop with twice as many clients as slots."""
    async with scheduler() as stub:
        client, until_s = CountingClient(stub, obeys=False), time.monotonic() + seconds

        async def loop(number: int) -> None:
            count = 0
            while time.monotonic() < until_s:
                await client.one(f"{number}-{count}")
                count += 1

        began_s = time.monotonic()
        await asyncio.gather(*(loop(number) for number in range(2 * NUM_SLOTS)))
        return client.tally.num_in_time / (time.monotonic() - began_s)


async def overload(
    rate_per_s: float, load: float, seconds: float, *, is_limited: bool
) -> AdmissionOutcome:
    """One line: the load offered for `seconds`, and its results."""
    async with scheduler(max_waiting_requests=MAX_WAITING if is_limited else 0) as stub:
        client = CountingClient(stub, obeys=True)
        began_s, ended_s = await client.send(rate_per_s * load, seconds, seed=int(10 * load))
    tally = client.tally
    # Until the first deadline, the queue fills.
    settled_s = began_s + DEADLINE_S
    in_window = sum(settled_s <= at_s < ended_s for at_s in tally.answered_at_s)
    latencies_s = sorted(tally.latencies_s)
    return AdmissionOutcome(
        admission=f"at most {MAX_WAITING} wait" if is_limited else "no limit",
        load=load,
        goodput_per_s=in_window / (ended_s - settled_s),
        p99_s=latencies_s[int(0.99 * (len(latencies_s) - 1))] if latencies_s else 0.0,
        refused=tally.num_refused / tally.num_sent,
        expired=tally.num_expired / tally.num_sent,
        retries_in_time=tally.num_retried_in_time / tally.num_refused
        if tally.num_refused
        else None,
    )


async def shares(rate_per_s: float, seconds: float, policy: Policy) -> TenantShare:
    """Two tenants, one of which sends ten times as much; either alone could use half the worker."""
    limit = {"max_waiting_requests_per_tenant": MAX_WAITING // 2}
    if policy is Policy.FCFS:
        limit = {"max_waiting_requests": MAX_WAITING}
    async with scheduler(policy=policy, **limit) as stub:
        light, heavy = (CountingClient(stub, name, obeys=False) for name in ("light", "heavy"))
        await asyncio.gather(
            light.send(0.6 * rate_per_s, seconds, seed=1),
            heavy.send(6.0 * rate_per_s, seconds, seed=2),
        )
    light_per_s, heavy_per_s = (each.tally.num_in_time / seconds for each in (light, heavy))
    jain = (light_per_s + heavy_per_s) ** 2 / (2 * (light_per_s**2 + heavy_per_s**2))
    return TenantShare(policy.value, light_per_s, heavy_per_s, jain)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def tell(outcome: AdmissionOutcome, capacity: float) -> Iterator[str]:
    yield f"{outcome.admission:16}{outcome.load:>5.0f}x{outcome.goodput_per_s:>12.1f}"
    yield f"{percent(outcome.goodput_per_s / capacity):>10}{outcome.p99_s:>9.2f}"
    yield f"{percent(outcome.refused):>10}{percent(outcome.expired):>10}"
    yield f"{percent(outcome.retries_in_time):>16}"


async def run(seconds: float) -> AsyncIterator[dict[str, object]]:
    """Yields every line as soon as it is measured."""
    capacity = await capacity_per_s(min(seconds, 4.0))
    print(f"capacity {capacity:.1f} requests/s, deadline {DEADLINE_S:g} s")
    print(
        f"{'':16}{'load':>6}{'goodput/s':>12}{'of cap.':>10}{'p99 s':>9}{'refused':>10}"
        f"{'expired':>10}{'1st retry good':>16}"
    )
    for is_limited in (False, True):
        for load in LOADS:
            outcome = await overload(capacity, load, seconds, is_limited=is_limited)
            print("".join(tell(outcome, capacity)), flush=True)
            yield asdict(outcome) | {"capacity_per_s": capacity}
    print(f"\n{'two tenants':16}{'light/s':>10}{'heavy/s':>10}{'Jain':>8}")
    for policy in (Policy.FCFS, Policy.FAIR):
        share = await shares(capacity, seconds, policy)
        print(
            f"{share.policy:16}{share.light_per_s:>10.1f}{share.heavy_per_s:>10.1f}"
            f"{share.jain:>8.3f}",
            flush=True,
        )
        yield asdict(share) | {"capacity_per_s": capacity}


async def main() -> None:
    parser = new_parser("bench.overload", __doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals per line")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object per line to FILE")
    args = parser.parse_args()
    async for line in run(args.seconds):
        if args.json:
            with open(args.json, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
