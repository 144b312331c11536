"""A client of the scheduler that submits a whole workload at once and records arrival times."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from bench.harness.workloads import WorkloadRequest
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from wire.columns import UINT32, pack, unpack

CONNECT_TIMEOUT_S = 10.0
SETTLED = 8  # tokens of every request before steps are timed


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a run."""

    num_tokens: int  # received so far, of all requests together
    at_s: float


@dataclass(slots=True)
class Run:
    """Times and counts of one run."""

    started_s: float
    num_tokens: list[int]  # per request
    settled: Mark | None = None  # when all requests were decoding
    first_end: Mark | None = None
    ended_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(self.num_tokens) / self.seconds

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    @property
    def step_ms(self) -> float:
        """Mean time of the steps between the last start and the first end, in milliseconds.

        Counted in tokens, since a message may have those of several steps.
        """
        if self.settled is None or self.first_end is None:
            raise RuntimeError("the requests never decoded side by side")
        num_steps = (self.first_end.num_tokens - self.settled.num_tokens) / len(self.num_tokens)
        return (self.first_end.at_s - self.settled.at_s) / num_steps * 1e3

    def note(self, message: scheduler_pb2.SessionResponse, now_s: float) -> None:
        """Counts the tokens of a message."""
        for handle in unpack(message.handles, UINT32).tolist():
            self.num_tokens[handle] += 1
        if self.settled is None and min(self.num_tokens) >= SETTLED:
            self.settled = Mark(sum(self.num_tokens), now_s)
        if message.finished and self.first_end is None:
            self.first_end = Mark(sum(self.num_tokens), now_s)


async def drive(
    address: str, requests: Sequence[WorkloadRequest], temperature: float, tag: str
) -> Run:
    """Submits all requests at once over one Session and reads until all have ended."""
    submits = [
        _to_submit(handle, request, temperature, tag) for handle, request in enumerate(requests)
    ]
    done = asyncio.Event()

    async def frames() -> AsyncIterator[scheduler_pb2.SessionRequest]:
        for submit in submits:
            yield submit
        await done.wait()

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        run = Run(time.perf_counter(), [0] * len(requests))
        num_left = len(requests)
        async for message in scheduler_pb2_grpc.SchedulerServiceStub(channel).Session(frames()):
            now_s = time.perf_counter()
            run.note(message, now_s)
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


def _to_submit(
    handle: int, request: WorkloadRequest, temperature: float, tag: str
) -> scheduler_pb2.SessionRequest:
    sampling = types_pb2.SamplingParams(
        temperature=temperature, seed=handle, max_tokens=request.max_tokens, ignore_eos=True
    )
    return scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=handle,
            request_id=f"{tag}-{handle}",
            prompt_token_ids=pack(request.prompt),
            sampling=sampling,
        )
    )
