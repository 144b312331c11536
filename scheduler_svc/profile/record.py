"""Records the next steps of all worker groups that are ready, for one caller at a time."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from pagewire.v1 import debug_pb2
from scheduler_svc.engine import Engine
from scheduler_svc.group import WorkerGroup
from scheduler_svc.observe.step_profile import LoopInterval, LoopProfile
from scheduler_svc.profile.clocks import ClockBounds
from scheduler_svc.worker.link import LinkLost
from wire.requests.profile import MOST_PER_MESSAGE, ProfileRefused, check_profile

_MARGIN_S = 10.0  # for a worker's last message after its time is up
_LAST_APPLY_S = 10.0  # for a busy machine; it takes milliseconds
_POLL_S = 0.01


@dataclass(slots=True)
class _Recording:
    """One group: its loop here, its worker there."""

    group: WorkerGroup
    loop: LoopProfile
    bounds: ClockBounds
    found: list[debug_pb2.ProfileInterval] = field(default_factory=list)
    num_steps: int = 0
    num_left_out: int = 0


class Profiler:
    """Makes recordings, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_busy = False

    async def record(
        self, request: debug_pb2.ProfileStepsRequest
    ) -> list[debug_pb2.ProfileStepsResponse]:
        """The messages of a whole recording. Raises ProfileRefused."""
        wait_s = check_profile(request)
        groups = [group for group in self._engine.groups if group.is_ready]
        if not groups:
            raise ProfileRefused(grpc.StatusCode.UNAVAILABLE, self._engine.reason)
        if self._is_busy:
            problem = "ProfileSteps: another recording is under way"
            raise ProfileRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        self._is_busy = True
        tasks = [asyncio.create_task(_record(group, request, wait_s)) for group in groups]
        try:
            recordings = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._is_busy = False
        if not any(recording.num_steps for recording in recordings):
            problem = f"steps: none was computed within {wait_s:g} s"
            raise ProfileRefused(grpc.StatusCode.DEADLINE_EXCEEDED, problem)
        return list(_messages(recordings))


async def _record(
    group: WorkerGroup, request: debug_pb2.ProfileStepsRequest, wait_s: float
) -> _Recording:
    """Records one group. Its worker says which steps: those that it computes from now on."""
    began_ns = time.monotonic_ns()
    recording = _Recording(group, LoopProfile(), ClockBounds(-(1 << 63), 1 << 63))
    group.profile = recording.loop
    try:
        await _read_worker(recording, request, wait_s, began_ns)
        await _last_is_applied(recording)
    except grpc.aio.AioRpcError as error:
        problem = f"worker {group.address}: {error.details()}"
        raise ProfileRefused(error.code(), problem) from error
    except LinkLost as error:
        raise ProfileRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
    finally:
        group.profile = None
    _keep_same_steps(recording)
    return recording


async def _read_worker(
    recording: _Recording,
    request: debug_pb2.ProfileStepsRequest,
    wait_s: float,
    began_ns: int,
) -> None:
    is_first = True
    async for message in recording.group.worker.profile(request, wait_s + _MARGIN_S):
        now_ns = time.monotonic_ns()
        recording.bounds.before(message.clock_ns, now_ns)
        if is_first:
            recording.bounds.after(began_ns, message.clock_ns)
            is_first = False
        recording.found.extend(message.intervals)
        recording.num_left_out = message.num_left_out


async def _last_is_applied(recording: _Recording) -> None:
    """Waits for the last step's result: its worker was quicker to say that it had computed it."""
    last = max((interval.step_id for interval in recording.found), default=0)
    deadline_s = time.monotonic() + _LAST_APPLY_S
    while last and last not in recording.loop.steps and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)


def _keep_same_steps(recording: _Recording) -> None:
    """Leaves out what only one of the two sides has recorded, and bounds the clocks by the rest."""
    theirs = {i.step_id for i in recording.found if i.step_id and i.name == "step"}
    loop = recording.loop
    both = theirs & set(loop.steps)
    recording.num_steps = len(both)
    recording.found = [i for i in recording.found if i.step_id in both or not i.step_id]
    loop.intervals = [i for i in loop.intervals if i.step_id in both]
    for interval in recording.found:
        if interval.step_id and interval.name == "step":
            times = loop.steps[interval.step_id]
            recording.bounds.after(times.sent_ns, interval.begin_ns)
            recording.bounds.before(interval.begin_ns + interval.duration_ns, times.done_ns)


def _messages(recordings: list[_Recording]) -> Iterator[debug_pb2.ProfileStepsResponse]:
    has_several = len(recordings) > 1
    found: list[debug_pb2.ProfileInterval] = []
    for recording in recordings:
        address = recording.group.address
        for ours in recording.loop.intervals:
            found.append(_to_proto(ours, f" of {address}" if has_several else ""))
        for theirs in recording.found:
            theirs.service = f"worker {address}"
            theirs.begin_ns += recording.bounds.offset_ns
            found.append(theirs)
    for begin in range(0, len(found), MOST_PER_MESSAGE):
        part = found[begin : begin + MOST_PER_MESSAGE]
        yield debug_pb2.ProfileStepsResponse(clock_ns=time.monotonic_ns(), intervals=part)
    yield debug_pb2.ProfileStepsResponse(
        clock_ns=time.monotonic_ns(),
        num_steps=max(recording.num_steps for recording in recordings),
        num_left_out=sum(recording.num_left_out for recording in recordings),
        clock_error_ns=max(recording.bounds.error_ns for recording in recordings),
    )


def _to_proto(interval: LoopInterval, suffix: str) -> debug_pb2.ProfileInterval:
    return debug_pb2.ProfileInterval(
        service="scheduler",
        track=interval.track + suffix,
        name=interval.name,
        begin_ns=interval.begin_ns,
        duration_ns=interval.duration_ns,
        step_id=interval.step_id,
        num_tokens=interval.num_tokens,
    )
