"""Simulated streams between scheduler and workers that lose, repeat, reorder, delay and break.

The scheduler gets a channel with gRPC's interface; its own code for links runs unchanged. Every
frame is serialized, so that the receiver gets what a wire would carry.
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
_RESEND_S = 0.05  # TCP's retransmission


@dataclass(slots=True)
class Weather:
    """Current network conditions; may change during a run."""

    delay_s: float = 0.0002
    jitter_s: float = 0.0  # at most this much more delay, order kept
    loss: float = 0.0  # probability per frame
    repeat: float = 0.0
    reorder: float = 0.0
    is_parted: bool = False  # frames wait until it ends
    is_parted_upwards: bool = False  # frames to the worker only


class Host(Protocol):
    """The worker at an address."""

    weather: Weather

    def describe(self) -> worker_pb2.DescribeResponse | None:
        """The answer to Describe; None when no process listens."""

    def accept(self, end: "WorkerEnd") -> bool:
        """Accepts a new stream; False when no process listens."""


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
        """Sends a frame; it may be lost, repeated, delayed or reordered."""
        weather, rng = self._weather, self._rng
        fate = rng.random()
        if fate < weather.loss:
            return
        times = 2 if fate < weather.loss + weather.repeat else 1
        for _ in range(times):
            at_s = self._loop.time() + weather.delay_s + rng.random() * weather.jitter_s
            if rng.random() < weather.reorder:
                at_s += 5 * weather.delay_s + rng.random() * 0.05  # other frames may overtake it
            else:
                # Never at the same time: timers due together run in any order.
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
        """Sends a frame to the scheduler."""
        if not self.is_over:
            self._down.send(response.SerializeToString())

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the stream with a status, after the frames sent before."""
        if not self.is_over:
            self.is_over = True
            self._peer.status = code, details
            self._down.send(b"")  # an end is delayed and held as a frame is

    def reset(self) -> None:
        """Breaks the connection; both sides notice at once."""
        self.vanish()
        self._peer.break_off(grpc.StatusCode.UNAVAILABLE, "the connection was reset")

    def vanish(self) -> None:
        """Drops all frames from now on, without the other side noticing."""
        if not self.up.is_broken:
            self.is_over = self.up.is_broken = self._down.is_broken = True
            self.frames.put_nowait(None)


class SchedulerEnd:
    """A stream as the scheduler sees it: the part of grpc.aio's stream call that it uses."""

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
        """Receives a frame from the worker, or the stream's end (empty)."""
        if frame:
            self._frames.put_nowait(frame)
        elif self.status[0] is grpc.StatusCode.OK:
            self._frames.put_nowait(None)
        else:
            self.break_off(*self.status)

    def break_off(self, code: grpc.StatusCode, details: str) -> None:
        """Fails every read and write from now on."""
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
            raise asyncio.CancelledError  # grpc.aio raises it as if the task had been cancelled
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
    """The part of grpc.aio.Channel that a scheduler uses: Describe, and the step stream."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._rng = rng

    def unary_unary(
        self, method: str, request_serializer: Serialize, response_deserializer: Parse, **_: object
    ) -> Callable[..., Awaitable[object]]:
        """As grpc.aio's; only Describe is served."""

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
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "no process listens")
        return answer


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """An AioRpcError as grpc.aio raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
