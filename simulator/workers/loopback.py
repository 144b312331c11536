"""A fake worker served like a real one: with threads, serialized messages and a timed device.

A step takes the modelled time from when the device begins it: when the previous step has ended or,
if later, when the step has arrived. So the time between two ends minus the modelled time is the
cost of scheduler and wire.
"""

import ctypes
import random
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from pagewire.v1 import worker_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel, describe, slots_of, to_output
from simulator.workers.slots import InconsistentStep
from simulator.workers.stream import FrameRefused, StepProgress, steps_of
from wire.columns import BadColumn
from wire.server import SERVER_OPTIONS, bind

SERVICE = "pagewire.v1.WorkerService"
_SPIN_S = 200e-6  # a sleep may end this much late
_PR_SET_TIMERSLACK = 29
_CUT_TAG = bytes([worker_pb2.AttachRequest.CUT_FIELD_NUMBER << 3 | 2])


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step as the device saw it."""

    step_id: int
    num_rows: int
    num_tokens: int
    ended_s: float  # monotonic
    bytes_in: int  # of the frame; 0 for later steps of a grant
    bytes_out: int


class Device:
    """The slots of one stream, and the thread that computes."""

    def __init__(
        self, model: FakeModel, step_time: StepTime, record: Callable[[DeviceStep], None]
    ) -> None:
        self._slots = slots_of(model)
        self._step_time = step_time
        self._record = record

    def run(self, step: worker_pb2.SchedulerOutput, num_bytes: int) -> bytes:
        """Computes one step and returns the serialized answer. Raises Refused."""
        began_s = time.perf_counter()
        try:
            outcome = self._slots.apply(step)
        except (InconsistentStep, BadColumn, IndexError) as error:
            raise FrameRefused("INVALID_ARGUMENT", str(error)) from error
        num_tokens, num_context = outcome.num_computed_tokens, self._slots.context_tokens
        output = to_output(step.step_id, outcome)
        if step.wants_state:
            output.state.CopyFrom(worker_pb2.StateHashes(**self._slots.state().pack()))
        frame = worker_pb2.AttachResponse(output=output).SerializeToString()
        wait_until(began_s + self._step_time.of(num_tokens, num_context))
        ended_s, num_rows = time.perf_counter(), len(outcome.token_ids)
        self._record(DeviceStep(step.step_id, num_rows, num_tokens, ended_s, num_bytes, len(frame)))
        return frame

    def skip(self, frame: worker_pb2.SchedulerOutput | None) -> None:
        """Ends a grant early; applies the frame's changes if none of its steps was computed."""
        self._slots.skip(frame)


def wait_until(moment_s: float) -> None:
    """Sleeps, then spins, yielding to other threads between two looks at the clock."""
    left_s = moment_s - time.perf_counter()
    if left_s > _SPIN_S:
        time.sleep(left_s - _SPIN_S)
    while time.perf_counter() < moment_s:
        select.select((), (), (), 0)


def wake_on_time() -> None:
    """Asks Linux to end this thread's sleeps on time; by default they may be 50 us late."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Attachment:
    """One scheduler's stream: a reader, the device's thread, and a writer."""

    def __init__(self, hello: worker_pb2.Hello, device: Device) -> None:
        self.interval_s = hello.heartbeat_interval_ms / 1e3 or None
        # A refusal ends the stream with an error, None ends it normally.
        self.outbox: SimpleQueue[bytes | FrameRefused | None] = SimpleQueue()
        self.is_over = False
        self._device = device
        self._inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._beat = worker_pb2.Heartbeat()
        self._next_step_id = hello.first_step_id
        self._progress, self._lock = StepProgress(hello), threading.Lock()

    def read(self, frames: Iterator[bytes]) -> None:
        """The reader: queues steps, applies cuts."""
        try:
            for frame in frames:
                self._beat.num_frames_received += 1
                if _is_cut(frame):
                    cut = worker_pb2.AttachRequest.FromString(frame).cut
                    with self._lock:
                        self.outbox.put(self._progress.cut(cut).SerializeToString())
                else:
                    self._inbox.put(frame)
        except grpc.RpcError:  # gRPC's signal that the call is over
            pass
        self._inbox.put(None)

    def compute(self) -> None:
        """The device's thread."""
        wake_on_time()
        try:
            while (frame := self._inbox.get()) is not None and not self.is_over:
                self._run(worker_pb2.AttachRequest.FromString(frame).step, len(frame))
            self.outbox.put(None)
        except FrameRefused as refused:
            self.outbox.put(refused)

    def write(self) -> Iterator[bytes | FrameRefused]:
        """The writer: yields queued answers, or a heartbeat when there are none."""
        while True:
            try:
                item = self.outbox.get(timeout=self.interval_s)
            except Empty:
                yield worker_pb2.AttachResponse(heartbeat=self._beat).SerializeToString()
                continue
            if item is None:
                return
            self._beat.num_frames_sent += 1
            yield item

    def end(self) -> None:
        """Ends the threads when the call is over."""
        self.is_over = True
        self._inbox.put(None)
        self.outbox.put(None)

    def _run(self, frame: worker_pb2.SchedulerOutput, num_bytes: int) -> None:
        if frame.step_id != self._next_step_id:
            expected = f"expected {self._next_step_id}"
            raise FrameRefused("ABORTED", f"step_id {frame.step_id} does not follow: {expected}")
        self._next_step_id += max(frame.granted_steps, 1)
        for step in steps_of(frame):
            with self._lock:
                is_left_out = not self._progress.begin(step.step_id)
            if is_left_out and not frame.granted_steps:
                raise FrameRefused("INVALID_ARGUMENT", f"cut: step {step.step_id} was not granted")
            if is_left_out:
                self._device.skip(frame if step is frame else None)
                return
            self.outbox.put(self._device.run(step, num_bytes if step is frame else 0))


def _is_cut(frame: bytes) -> bool:
    return frame.startswith(_CUT_TAG)  # steps are not parsed twice


class LoopbackWorker:
    """Implements Describe and Attach on a threaded server."""

    def __init__(
        self, model: FakeModel, step_time: StepTime, record: Callable[[DeviceStep], None]
    ) -> None:
        self._model = model
        self._step_time = step_time
        self._record = record
        self._incarnation = random.getrandbits(63)
        self._epoch = 0
        self._current: Attachment | None = None
        self._lock = threading.Lock()

    def describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.DescribeResponse:
        """The description; always ready."""
        return worker_pb2.DescribeResponse(
            phase=worker_pb2.WORKER_PHASE_READY,
            description=describe(self._model, self._incarnation),
            epoch=self._epoch,
        )

    def attach(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The writer of a new stream; ends the previous stream."""
        first = next(frames, None)
        hello = worker_pb2.AttachRequest.FromString(first or b"").hello
        with self._lock:
            if hello.epoch <= self._epoch:
                message = f"epoch {hello.epoch} is not above {self._epoch}"
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            device = Device(self._model, self._step_time, self._record)
            attachment = Attachment(hello, device)
            self._epoch, before, self._current = hello.epoch, self._current, attachment
        if before is not None:
            before.outbox.put(FrameRefused("ABORTED", f"epoch {hello.epoch} took over"))
        context.add_callback(attachment.end)
        for work in (lambda: attachment.read(frames), attachment.compute):
            threading.Thread(target=work, daemon=True).start()
        greeting = describe(self._model, self._incarnation)
        yield worker_pb2.AttachResponse(description=greeting).SerializeToString()
        for item in attachment.write():
            if isinstance(item, FrameRefused):
                context.abort(grpc.StatusCode[item.status], str(item))
                return
            yield item


def start(worker: LoopbackWorker, address: str) -> tuple[grpc.Server, int]:
    """Serves a worker; returns the server and its port. Raises wire.server.PortInUse."""
    server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
    handlers: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            worker.describe,
            worker_pb2.DescribeRequest.FromString,
            worker_pb2.DescribeResponse.SerializeToString,
        ),
        "Attach": grpc.stream_stream_rpc_method_handler(worker.attach),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = bind(server, address, "the fake worker (--port)")
    server.start()
    return server, port
