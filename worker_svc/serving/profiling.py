"""ProfileSteps of the worker: one recording at a time, sent while it grows."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from pagewire.v1 import debug_pb2
from wire.requests.profile import MOST_PER_MESSAGE, ProfileRefused, check_profile
from worker_svc.observe.kernel_profile import KernelProfile
from worker_svc.observe.step_profile import StepInterval, StepProfile
from worker_svc.runner.model_runner import ModelRunner

POLL_S = 0.02


class Profiling:
    """Records one runner's steps for one caller."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def record(
        self,
        runner: ModelRunner | None,
        request: debug_pb2.ProfileStepsRequest,
        context: grpc.ServicerContext,
    ) -> Iterator[debug_pb2.ProfileStepsResponse]:
        """The recording as it grows, until it is full, late, or its caller leaves.

        Raises ProfileRefused before the first message.
        """
        timeout_s, runner = check_profile(request), _checked(runner, request)
        if not self._busy.acquire(blocking=False):
            problem = "ProfileSteps: another recording is under way on this worker"
            raise ProfileRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        try:
            yield from _record(runner, request, timeout_s, context)
        finally:
            self._busy.release()


def _checked(runner: ModelRunner | None, request: debug_pb2.ProfileStepsRequest) -> ModelRunner:
    if runner is None:
        problem = "ProfileSteps: the worker has not loaded its model"
        raise ProfileRefused(grpc.StatusCode.FAILED_PRECONDITION, problem)
    if request.kernels and runner.device.type != "cuda":
        problem = f"kernels: this worker computes on {runner.device.type}, which has none to record"
        raise ProfileRefused(grpc.StatusCode.FAILED_PRECONDITION, problem)
    return runner


def _record(
    runner: ModelRunner,
    request: debug_pb2.ProfileStepsRequest,
    timeout_s: float,
    context: grpc.ServicerContext,
) -> Iterator[debug_pb2.ProfileStepsResponse]:
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as recording:
        kernels = KernelProfile() if request.kernels else None
        if kernels is not None:
            recording.enter_context(kernels)
        profile = recording.enter_context(_profiled(runner, request.steps))
        yield _message([])  # it records from here on
        while context.is_active() and time.monotonic() < deadline_s:
            is_full = profile.is_full.wait(POLL_S)
            if found := profile.take():
                yield _message(found)
            if is_full:
                break
    found = profile.take()
    if kernels is not None:
        found += kernels.intervals()
    for begin in range(0, len(found), MOST_PER_MESSAGE):
        yield _message(found[begin : begin + MOST_PER_MESSAGE])
    last = _message([])
    last.num_steps = profile.num_recorded
    last.num_left_out = 0 if kernels is None else kernels.num_left_out
    yield last


@contextmanager
def _profiled(runner: ModelRunner, num_steps: int) -> Iterator[StepProfile]:
    profile = StepProfile(num_steps, is_asynchronous=runner.is_asynchronous)
    runner.recording = profile
    try:
        yield profile
    finally:
        runner.recording = None


def _message(intervals: list[StepInterval]) -> debug_pb2.ProfileStepsResponse:
    return debug_pb2.ProfileStepsResponse(
        clock_ns=time.perf_counter_ns(),
        intervals=[
            debug_pb2.ProfileInterval(
                service="worker",
                track=interval.track,
                name=interval.name,
                begin_ns=interval.begin_ns,
                duration_ns=interval.duration_ns,
                step_id=interval.step_id,
                num_tokens=interval.num_tokens,
                num_decode_rows=interval.num_decode_rows,
            )
            for interval in intervals
        ],
    )
