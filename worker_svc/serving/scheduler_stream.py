"""One attached scheduler: what its step stream has received, runs and still has to send.

A stream's reader submits frames, the compute thread executes them, and the stream's writer sends
what is in the outbox. A stream ends with an exception that the service maps to a status.
"""

import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from wire.versions import (
    DISK_TIER,
    MINOR_WITH_DISK,
    MINOR_WITH_DRAFTS_OF_STATES,
    MINOR_WITH_DRAIN,
)
from worker_svc.adapters.orders import encode_adapter_prepared
from worker_svc.process.failpoints import StreamFaults
from worker_svc.protocol import codec
from worker_svc.protocol.codec import Heartbeat, Hello
from worker_svc.protocol.preparations import encode_prepared
from worker_svc.protocol.step import BadStep, CutRequest, StepInput, StepOutput
from worker_svc.protocol.transfers import Keys, TransferEnd, encode_contents, encode_done
from worker_svc.serving.session_errors import StepGap

MAX_FRAMES_IN_FLIGHT = 6  # three with steps, and as many emptied by cuts
MAX_STEPS_LAUNCHED = 3  # on an asynchronous device: one running, two queued
_KEYS_AT_ONCE = 4096  # in one frame about what a tier holds
_BEAT_NOW = b""  # in the outbox: a heartbeat, with the counts of the moment when it is sent


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """The phase that a stream has reached."""

    next_step_id: int
    num_received: int  # frames
    is_idle: bool  # no step runs
    knows_of_drain: bool = False  # the scheduler was told, and will end the stream


class SchedulerStream:
    """One attached scheduler. Threads of the service read and write its stream."""

    def __init__(self, hello: Hello, faults: StreamFaults | None = None) -> None:
        self.epoch = hello.epoch
        self.faults = faults  # injected by tests
        # Frames to send; then the exception that ends the stream, or None for a normal end.
        self.outbox: SimpleQueue[bytes | Exception | None] = SimpleQueue()
        self.is_over = False
        self._next_step_id = hello.first_step_id
        self._is_first = True
        self._failed_step_id: int | None = None
        self._frames = threading.Semaphore(MAX_FRAMES_IN_FLIGHT)
        self._launches = threading.Semaphore(MAX_STEPS_LAUNCHED)
        # Guards the state shared by cuts and the compute thread.
        self._lock = threading.Lock()
        self._last_begun = hello.first_step_id - 1
        self._left_out: list[range] = []  # ids of cancelled steps
        self._heartbeat_interval_s = hello.heartbeat_interval_s
        self._num_received = 0  # frames, by the reader
        self._num_sent = 0  # frames, by the writer; the first is the greeting
        self._running = (0, 0.0)  # (id of the running step or 0, start time in s)
        self._is_draining = False
        self._may_tell = hello.protocol_minor >= MINOR_WITH_DRAIN
        self._knows_disk = hello.protocol_minor >= MINOR_WITH_DISK
        # Whether the scheduler keeps drafts and snapshots of states apart.
        self.may_draft_states = hello.protocol_minor >= MINOR_WITH_DRAFTS_OF_STATES

    @property
    def progress(self) -> StreamProgress:
        """The steps that have come and that run, without a lock: a moment's view."""
        is_idle, is_told = self._running[0] == 0, self._is_draining and self._may_tell
        return StreamProgress(self._next_step_id, self._num_received, is_idle, is_told)

    # --- the reader and the writer ---------------------------------------------------------------

    def wait_for_room(self) -> None:
        """Counts a received frame; blocks the reader while too many frames are queued, so that
        gRPC's flow control slows the scheduler down."""
        self._num_received += 1
        self._frames.acquire()

    def cut(self, cut: CutRequest) -> None:
        """Counts the frame, cancels the named steps that have not begun and reports them now."""
        self._num_received += 1
        with self._lock:
            first = max(cut.first_step_id, self._last_begun + 1)
            first = min(first, cut.last_step_id + 1)
            # Frames with steps of an earlier cut may still be queued.
            self._left_out = [s for s in self._left_out if s.stop > self._last_begun]
            self._left_out.append(range(first, cut.last_step_id + 1))
            if not self.is_over:
                self.outbox.put(codec.encode_skipped(first, cut.last_step_id))

    def count_frame(self) -> None:
        """Counts a received frame that is handled at once."""
        self._num_received += 1

    def prepared(self, preparation_id: int, problem: str) -> None:
        """Sends what became of a preparation, from any thread."""
        if not self.is_over:
            self.outbox.put(encode_prepared(preparation_id, problem))

    def adapter_prepared(self, preparation_id: int, problem: str) -> None:
        """Sends what became of a preparation of an adapter, from any thread."""
        if not self.is_over:
            self.outbox.put(encode_adapter_prepared(preparation_id, problem))

    def transfer_done(self, transfer_id: int, end: TransferEnd) -> None:
        """Sends what became of a transfer, from any thread."""
        if not self.is_over:
            self.outbox.put(encode_done(transfer_id, end))

    def tell_disk(self, keys: Keys) -> None:
        """Sends what the disk tier holds, from any thread, to a scheduler that knows of it."""
        for begin in range(0, len(keys) if self._knows_disk else 0, _KEYS_AT_ONCE):
            if not self.is_over:
                part = keys[begin : begin + _KEYS_AT_ONCE]
                self.outbox.put(encode_contents(DISK_TIER, part))

    def next_frame(self) -> bytes | None:
        """Waits for the next frame to send; returns a heartbeat after an interval without one, None
        at the end of the stream. Raises the exception that ends the stream."""
        try:
            # The scheduler expects no heartbeats before the greeting.
            item = self.outbox.get(timeout=self._heartbeat_interval_s if self._num_sent else None)
            if item == _BEAT_NOW and not self._num_sent:
                item = self.outbox.get()
                self.outbox.put(_BEAT_NOW)
        except Empty:
            item = _BEAT_NOW
        if item == _BEAT_NOW:
            return codec.encode_heartbeat(self._heartbeat())
        if isinstance(item, Exception):
            raise item
        self._num_sent += 1
        return item

    def _heartbeat(self) -> Heartbeat:
        step_id, since_s = self._running
        running_s = time.perf_counter() - since_s if step_id else 0.0
        is_draining = self._is_draining and self._may_tell
        return Heartbeat(self._num_received, self._num_sent - 1, step_id, running_s, is_draining)

    def drain(self) -> None:
        """Tells the scheduler that the worker was asked to end, now and in each heartbeat."""
        self._is_draining = True
        if self._may_tell and not self.is_over:
            self.outbox.put(_BEAT_NOW)

    # --- the compute thread ----------------------------------------------------------------------

    def greet(self, frame: bytes) -> None:
        """Queues the first frame, sent once all work of the previous stream is done."""
        if not self.is_over:
            self.outbox.put(frame)

    def executed(self) -> None:
        """Makes room for another frame, after one has been executed."""
        self._frames.release()

    def check(self, step: StepInput) -> None:
        """Accepts the steps of the next frame; raises StepGap or BadStep for a wrong sequence."""
        if step.step_id != self._next_step_id:
            raise StepGap(f"step_id {step.step_id} does not follow: expected {self._next_step_id}")
        if self._is_first and not step.reset:
            raise BadStep("reset", "must be set on the first step of a stream")
        self._next_step_id = step.last_step_id + 1
        self._is_first = False

    def begin(self, step: StepInput) -> bool:
        """Waits until the step may be launched; returns False if a cut has cancelled it."""
        self._launches.acquire()
        with self._lock:
            if any(step.step_id in steps for steps in self._left_out):
                self._launches.release()
                return False
            self._last_begun = step.step_id
            self._running = step.step_id, time.perf_counter()
            return True

    def refusal(self, step: StepInput) -> str:
        """The reason to fail this step without launching it; empty if it may be launched."""
        failed_id = self._failed_step_id
        if step.reset or failed_id is None or step.ack_step_id >= failed_id:
            return ""
        # The scheduler planned this step on top of changes that were never applied.
        return f"planned before the failure of step {failed_id} was known"

    def note_failure(self, output: StepOutput) -> None:
        """After a failed step, makes `refusal` reject the steps planned on top of it."""
        if output.error:
            self._failed_step_id = output.step_id

    def answer(self, output: StepOutput) -> None:
        """Sends a step's output and makes room for another launch."""
        self.note_failure(output)
        if self._running[0] == output.step_id:
            self._running = 0, 0.0
        if not self.is_over:
            self.outbox.put(codec.encode_output(output))
        self._launches.release()

    def end(self, reason: Exception | None) -> None:
        """Ends the stream; calls after the first have no effect."""
        if not self.is_over:
            self.is_over = True
            self.outbox.put(reason)
            self._frames.release(MAX_FRAMES_IN_FLIGHT)
            self._launches.release(MAX_STEPS_LAUNCHED)
