"""Streams between the scheduler and its workers that lose, repeat, reorder, delay and break.

The scheduler is given a channel that looks like gRPC's; its own code for links runs unchanged. A
frame that is sent is serialized, so what arrives is what a wire would have carried.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from pagewire.v1 import worker_pb2

Serialize = Callable[[object], bytes]
Parse = Callable[[bytes], object]
_RESEND_S = 0.05  # as TCP, which tries again


@dataclass(slots=True)
class Weather:
    """What the network does at the moment; changed while it runs."""

    delay_s: float = 0.0002
    jitter_s: float = 0.0  # up to so much more, the order kept
    loss: float = 0.0  # of each frame, a probability
    repeat: float = 0.0
    reorder: float = 0.0
    is_parted: bool = False  # frames wait until it is over
    is_parted_upwards: bool = False  # those to the worker only


class Host(Protocol):
    """What stands at an address."""

    weather: Weather

    def describe(self) -> worker_pb2.DescribeResponse | None:
        """The answer to Describe; None when nobody listens."""

    def accept(self, end: "WorkerEnd") -> bool:
        """Takes a new stream; False when nobody listens."""


class Pipe:
    """One direction of a stream."""

    def __init__(
        self,
        weather: Weather,
        rng: random.Random,
        is_upwards: bool,
        deliver: Callable[[bytes], None],
    ) -> None:
        self._weather = weather
        self._rng = rng
        self._is_upwards = is_upwards
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._last_s = 0.0
        self._held: list[bytes] = []  # by a partition
        self.is_broken = False

    def send(self, frame: bytes) -> None:
        """Puts a frame on its way, if it is lucky."""
        weather, rng = self._weather, self._rng
        fate = rng.random()
        if fate < weather.loss:
            return
        times = 2 if fate < weather.loss + weather.repeat else 1
        for _ in range(times):
            at_s = self._loop.time() + weather.delay_s + rng.random() * weather.jitter_s
            if rng.random() < weather.reorder:
                at_s += 5 * weather.delay_s + rng.random() * 0.05  # others may pass it
            else:
                # Not at the same moment: timers that are due together come in any order.
                at_s = self._last_s = max(at_s, self._last_s + 1e-9)
            self._loop.call_at(at_s, self._arrive, frame)

    def _arrive(self, frame: bytes) -> None:
        if self.is_broken:
            return
        if self._weather.is_parted or (self._is_upwards and self._weather.is_parted_upwards):
            self._held.append(frame)
            if len(self._held) == 1:
                self._wait()
        else:
            self._deliver(frame)

    def _wait(self) -> None:
        if self._weather.is_parted or (self._is_upwards and self._weather.is_parted_upwards):
            self._loop.call_later(_RESEND_S, self._wait)
            return
        held, self._held = self._held, []
        for frame in held:
            self._arrive(frame)


class WorkerEnd:
    """A stream as the worker sees it."""

    def __init__(self, rng: random.Random, weather: Weather, peer: "SchedulerEnd") -> None:
        self.frames: asyncio.Queue[worker_pb2.AttachRequest | None] = asyncio.Queue()
        self.is_over = False
        self.up = Pipe(weather, rng, True, self._arrived)
        self._down = Pipe(weather, rng, False, peer.arrived)
        self._peer = peer

    def _arrived(self, frame: bytes) -> None:
        self.frames.put_nowait(worker_pb2.AttachRequest.FromString(frame))

    def send(self, response: worker_pb2.AttachResponse) -> None:
        """A frame to the scheduler."""
        if not self.is_over:
            self._down.send(response.SerializeToString())

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The stream ends with a status; what the worker sent before arrives before."""
        if not self.is_over:
            self.is_over = True
            self._peer.status = code, details
            self._down.send(b"")  # an end is as late as a frame, and may be held up like one

    def reset(self) -> None:
        """The connection breaks; both sides notice at once."""
        self.vanish()
        self._peer.break_off(grpc.StatusCode.UNAVAILABLE, "the connection was reset")

    def vanish(self) -> None:
        """Nothing gets through any more, and the other side does not notice."""
        if not self.up.is_broken:
            self.is_over = self.up.is_broken = self._down.is_broken = True
            self.frames.put_nowait(None)


class SchedulerEnd:
    """A stream as the scheduler sees it: what it uses of grpc.aio's stream call."""

    def __init__(self, host: Host, rng: random.Random, serialize: Serialize, parse: Parse) -> None:
        self._serialize, self._parse = serialize, parse
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._error: grpc.aio.AioRpcError | None = None
        self._is_cancelled = False
        self.status: tuple[grpc.StatusCode, str] = grpc.StatusCode.UNAVAILABLE, "never answered"
        self._peer = WorkerEnd(rng, host.weather, self)
        if not host.accept(self._peer):
            self._peer.reset()

    def arrived(self, frame: bytes) -> None:
        """A frame from the worker, or the stream's end."""
        if frame:
            self._frames.put_nowait(frame)
        elif self.status[0] is grpc.StatusCode.OK:
            self._frames.put_nowait(None)
        else:
            self.break_off(*self.status)

    def break_off(self, code: grpc.StatusCode, details: str) -> None:
        """From now on every read and write fails."""
        if self._error is None:
            self._error = rpc_error(code, details)
            self._frames.put_nowait(None)

    async def write(self, request: object) -> None:
        """As grpc.aio's."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._error is not None:
            raise self._error
        self._peer.up.send(self._serialize(request))

    async def read(self) -> object:
        """As grpc.aio's: a response, EOF, or the error that the stream ended with."""
        if not self._is_cancelled:
            frame = await self._frames.get()
            if frame is not None and not self._is_cancelled:
                return self._parse(frame)
        if self._is_cancelled:
            raise asyncio.CancelledError  # gRPC says so as if the task had been cancelled
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF

    async def details(self) -> str:
        """As grpc.aio's."""
        return self.status[1]

    def cancel(self) -> bool:
        """As grpc.aio's."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._frames.put_nowait(None)
            self._peer.vanish()
        return True


class Channel:
    """What a scheduler uses of a grpc.aio.Channel to a worker: Describe, and the step stream."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._rng = rng

    def unary_unary(
        self, method: str, request_serializer: Serialize, response_deserializer: Parse, **_: object
    ) -> Callable[..., Awaitable[object]]:
        """As grpc.aio's. Only Describe does something."""

        async def call(request: object, timeout: float) -> object:
            assert method.endswith("/Describe"), method
            answer = await self._describe(timeout)
            return response_deserializer(answer.SerializeToString())

        return call

    def stream_stream(
        self, method: str, request_serializer: Serialize, response_deserializer: Parse, **_: object
    ) -> Callable[[], SchedulerEnd]:
        """As grpc.aio's."""
        return lambda: SchedulerEnd(
            self._host, self._rng, request_serializer, response_deserializer
        )

    async def close(self) -> None:
        """As grpc.aio's."""

    async def _describe(self, timeout_s: float) -> worker_pb2.DescribeResponse:
        weather, waited_s = self._host.weather, 0.0
        await asyncio.sleep(2 * weather.delay_s)
        while weather.is_parted or weather.is_parted_upwards:
            if waited_s >= timeout_s:
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
            await asyncio.sleep(_RESEND_S)
            waited_s += _RESEND_S
        answer = self._host.describe()
        if answer is None:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "nobody listens")
        return answer


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """As gRPC raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
