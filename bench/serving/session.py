"""Asks the scheduler itself: token ids in, token ids out, all requests over one Session."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from pagewire._types import Prompt, Usage
from pagewire.cli.benchmark.load import Ask, RequestFailed, StreamArrival
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from wire.columns import UINT32, pack, unpack

Arrivals = asyncio.Queue[StreamArrival | RequestFailed | None]


class SchedulerSession:
    """One Session, shared by all requests of this process."""

    def __init__(self, channel: grpc.aio.Channel, tag: str) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._tag = tag
        self._frames: asyncio.Queue[scheduler_pb2.SessionRequest] = asyncio.Queue()
        self._arrivals: list[Arrivals] = []  # by handle

    async def ask(
        self, prompt: Prompt, num_tokens: int, model: str
    ) -> AsyncGenerator[StreamArrival, None]:
        """Submits one request; yields an arrival for each message that has tokens of it."""
        if isinstance(prompt, str):
            raise RequestFailed("the scheduler takes token ids, no text")
        handle, arrivals, received = len(self._arrivals), Arrivals(), 0
        self._arrivals.append(arrivals)
        sampling = types_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        submit = scheduler_pb2.Submit(
            handle=handle,
            request_id=f"{self._tag}-{handle}",
            prompt_token_ids=pack(list(prompt)),
            sampling=sampling,
        )
        self._frames.put_nowait(scheduler_pb2.SessionRequest(submit=submit))
        while (arrival := await arrivals.get()) is not None:
            if isinstance(arrival, RequestFailed):
                raise arrival
            received += arrival.num_tokens
            yield arrival
        yield StreamArrival(0, Usage(len(prompt), received))

    async def run(self) -> None:
        """Hands each message's tokens to their requests, until cancelled."""
        async for message in self._stub.Session(self._sent()):
            counts: dict[int, int] = {}
            for handle in unpack(message.handles, UINT32).tolist():
                counts[handle] = counts.get(handle, 0) + 1
            for handle, count in counts.items():
                self._arrivals[handle].put_nowait(StreamArrival(count))
            for end in message.finished:
                if end.reason != types_pb2.FINISH_REASON_LENGTH:
                    failed = RequestFailed(f"ended early: {end.message}")
                    self._arrivals[end.handle].put_nowait(failed)
                self._arrivals[end.handle].put_nowait(None)

    async def _sent(self) -> AsyncIterator[scheduler_pb2.SessionRequest]:
        while True:
            yield await self._frames.get()


@contextlib.asynccontextmanager
async def connected(address: str, tag: str) -> AsyncIterator[Ask]:
    """An Ask over a Session of its own."""
    async with grpc.aio.insecure_channel(address) as channel:
        session = SchedulerSession(channel, tag)
        reading = asyncio.create_task(session.run())
        try:
            yield session.ask
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
