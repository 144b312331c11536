"""Rules of the step stream: one scheduler at a time, rising epochs, step ids without gaps.

The compute thread executes the frames that a stream's reader submits. On an asynchronous device it
only launches steps and a second thread waits for their results, so that a step is launched before
the previous one is done. This module does not use gRPC: a stream ends with an exception that the
service maps to a status.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from wire.versions import STEP_MAJOR, kv_groups_problem
from worker_svc.adapters.orders import decode_adapter_orders
from worker_svc.adapters.store import AdapterOrders
from worker_svc.parallel.leader import Ranks
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.process.failpoints import Failpoints
from worker_svc.process.step_limit import StepLimit
from worker_svc.protocol import codec
from worker_svc.protocol.codec import Hello
from worker_svc.protocol.preparations import PreparationOrders, decode_orders
from worker_svc.protocol.step import BadStep, StepInput, StepOutput
from worker_svc.protocol.transfers import CancelOrder, DropOrder, PeerOrder, decode_transfer
from worker_svc.runner.model_runner import ModelRunner, Pending, failed
from worker_svc.serving.adapter_traffic import AdapterTraffic
from worker_svc.serving.hold import Hold
from worker_svc.serving.scheduler_stream import SchedulerStream, StreamProgress
from worker_svc.serving.session_errors import (
    SessionError,
    StaleEpoch,
    StepGap,
    Stopping,
    TakenOver,
    UnknownProtocol,
)
from worker_svc.startup.lifecycle import Lifecycle

Found = TypeVar("Found")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stream that was ended because of one of its frames."""

    epoch: int
    cause: str


class Session:
    """The attached scheduler, the highest epoch and the last computed step."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        compute: ComputeThread,
        answers: ComputeThread,
        failpoints: Failpoints | None = None,
        ranks: Ranks | None = None,
        step_limit: StepLimit | None = None,
    ) -> None:
        self._failpoints = failpoints
        self._lifecycle = lifecycle
        self._ranks = ranks or Ranks()  # receives every call made on the runner
        self._step_limit = step_limit or StepLimit()
        self._compute = compute
        self._adapters = AdapterTraffic(compute, self._ranks)
        self._answers = answers
        self._lock = threading.Lock()
        self._stream: SchedulerStream | None = None
        self._epoch = 0
        self._last_step_id = 0
        self._is_draining = False
        self.refusal: Refusal | None = None  # the last one
        self.hold = Hold()

    @property
    def is_attached(self) -> bool:
        """True if a scheduler's stream is open."""
        return self._stream is not None

    @property
    def epoch(self) -> int:
        """The highest epoch so far."""
        return self._epoch

    @property
    def last_step_id(self) -> int:
        """The last step computed in the current epoch."""
        return self._last_step_id

    def attach(self, hello: Hello) -> SchedulerStream:
        """Attaches a scheduler, replacing the previous one. Raises a SessionError or WrongPhase."""
        if hello.protocol_version != STEP_MAJOR:
            raise UnknownProtocol(
                f"protocol_version {hello.protocol_version}, this worker speaks {STEP_MAJOR}"
            )
        windows = [group.window or 0 for group in self._lifecycle.ready_runner().limits.kv_groups]
        if problem := kv_groups_problem(hello.protocol_minor, windows):
            raise UnknownProtocol(problem)
        with self._lock:
            if self._is_draining:
                raise Stopping("the worker is shutting down")
            if hello.epoch <= self._epoch:
                raise StaleEpoch(f"epoch {hello.epoch} is not higher than {self._epoch}")
            faults = self._failpoints.next_stream() if self._failpoints else None
            previous, self._stream = self._stream, SchedulerStream(hello, faults)
            self._epoch, self._last_step_id = hello.epoch, 0
            self.hold.begin()
            if previous is not None:
                previous.end(TakenOver(f"a scheduler attached with epoch {hello.epoch}"))
            log.info("scheduler attached with epoch %d", hello.epoch)
            return self._stream

    def greet(self, stream: SchedulerStream, frame: bytes) -> None:
        """Sends the stream's first frame once the compute thread is free: a scheduler that attaches
        while a step hangs must not assume that its own steps would run."""
        self._compute.post(partial(self._greet, stream, frame))

    def _greet(self, stream: SchedulerStream, frame: bytes) -> None:
        try:
            self._lifecycle.ready_runner().forget_prepared()
            self._ranks.prepare(b"")
        finally:
            self._greet_after_transfers(stream, frame)

    def _greet_after_transfers(self, stream: SchedulerStream, frame: bytes) -> None:
        """Sends the first frame once no transfer of an older stream reads or writes a block."""
        runner = self._lifecycle.ready_runner()

        def greet() -> None:
            stream.greet(frame)
            if runner.disk_tier is not None:
                runner.disk_tier.tell(stream.tell_disk)

        if (peers := self._lifecycle.peers) is not None:
            greet = partial(peers.when_done, greet)
        for tier in runner.tiers.values():
            greet = partial(tier.when_done, greet)
        greet()

    def prepare(self, stream: SchedulerStream, frame: bytes) -> bool:
        """Starts to prepare a frame's grammars and pictures; returns False for any other frame."""
        limits = self._lifecycle.ready_runner().limits

        def start(orders: PreparationOrders) -> None:
            stream.count_frame()
            self._compute.post(partial(self._prepare, stream, frame, orders))

        return self._take(stream, partial(decode_orders, frame, limits), start)

    def _take(
        self,
        stream: SchedulerStream,
        decode: Callable[[], Found | None],
        use: Callable[[Found], None],
    ) -> bool:
        """Uses what a frame holds, if it is of this kind; one that cannot be read ends the stream.

        Returns False for a frame of another kind.
        """
        try:
            found = decode()
        except BadStep as error:
            log.warning("epoch %d ends: %s", stream.epoch, error)
            self.end(stream, error)
            return True
        if found is not None:
            use(found)
        return found is not None

    def _prepare(self, stream: SchedulerStream, frame: bytes, orders: PreparationOrders) -> None:
        if stream.is_over:
            return
        self._ranks.prepare(frame)
        runner = self._lifecycle.ready_runner()
        runner.prepare(orders, stream.prepared)
        if runner.has_pictures_waiting:
            self._compute.post(self._encode_pictures)

    def _encode_pictures(self) -> None:
        """Encodes some pictures; what is left follows the steps that are queued by now."""
        if self._lifecycle.ready_runner().encode_pictures():
            self._compute.post(self._encode_pictures)

    def adapt(self, stream: SchedulerStream, frame: bytes) -> bool:
        """Starts to prepare a frame's adapters; returns False for any other frame."""

        def start(orders: AdapterOrders) -> None:
            stream.count_frame()
            adapters = self._lifecycle.ready_runner().state.adapters
            self._adapters.take(stream, adapters, orders)

        return self._take(stream, partial(decode_adapter_orders, frame), start)

    def transfer(self, stream: SchedulerStream, frame: bytes) -> bool:
        """Starts a frame's transfer, or ends some early; returns False for any other frame."""
        runner = self._lifecycle.ready_runner()
        try:
            order = decode_transfer(frame, runner.limits)
        except BadStep as error:
            log.warning("epoch %d ends: %s", stream.epoch, error)
            self.end(stream, error)
            return True
        if order is None:
            return False
        stream.count_frame()
        is_over, answer = (lambda: stream.is_over), stream.transfer_done
        peers = self._lifecycle.peers
        if isinstance(order, CancelOrder):
            for tier in runner.tiers.values():
                tier.cancel(order.transfer_ids)
            if peers is not None:
                peers.cancel(order.transfer_ids)
        elif isinstance(order, PeerOrder):
            assert peers is not None  # else it was not decoded
            peers.submit(order, is_over, answer)
        elif isinstance(order, DropOrder):
            assert runner.disk_tier is not None  # likewise
            runner.disk_tier.drop(order)
        else:
            runner.tiers[order.tier].submit(order, is_over, answer)
        return True

    def submit(self, stream: SchedulerStream, frame: bytes) -> None:
        """Queues a frame for the compute thread."""
        self._compute.post(partial(self._execute, stream, frame, time.perf_counter()))

    def cut(self, stream: SchedulerStream, frame: bytes) -> bool:
        """Executes a cut immediately; returns False for any other frame."""
        return self._take(stream, partial(codec.decode_cut, frame), stream.cut)

    def finish(self, stream: SchedulerStream) -> None:
        """Ends the stream normally, after the steps that are queued already."""
        # Runs after the launched steps, and then after their answers.
        end = partial(self.end, stream, None)
        self._compute.post(partial(self._answers.post, end))

    def end(self, stream: SchedulerStream, reason: Exception | None) -> None:
        """Ends the stream now; another scheduler can attach."""
        with self._lock:
            if not (stream.is_over or reason is None or isinstance(reason, SessionError)):
                self.refusal = Refusal(stream.epoch, str(reason) or type(reason).__name__)
            stream.end(reason)
            if self._stream is stream:
                self._stream = None
                log.info("scheduler with epoch %d detached", stream.epoch)

    @property
    def progress(self) -> StreamProgress | None:
        """The progress of the attached scheduler's stream; None when none is attached."""
        stream = self._stream
        return None if stream is None else stream.progress

    def drain(self) -> None:
        """Refuses new streams, and tells the attached scheduler."""
        with self._lock:
            self._is_draining = True
            if self._stream is not None:
                self._stream.drain()

    def stop(self) -> None:
        """Ends the current stream and refuses new ones."""
        with self._lock:
            self._is_draining = True
            stream = self._stream
        if stream is not None:
            self.end(stream, Stopping("the worker is shutting down"))

    def _execute(self, stream: SchedulerStream, frame: bytes, arrived_s: float) -> None:
        if stream.is_over:
            return
        queue_us = int((time.perf_counter() - arrived_s) * 1e6)
        try:
            runner = self._lifecycle.ready_runner()
            step = codec.decode_step(frame, runner.limits)
            stream.check(step)
            self._ranks.take(frame)
            self._run(stream, runner, step, queue_us)
            if step.new_sequences and runner.has_pictures_waiting:  # there may be room for them now
                self._compute.post(self._encode_pictures)
        except (BadStep, StepGap) as error:
            log.warning("epoch %d ends: %s", stream.epoch, error)
            self.end(stream, error)
        except Exception as error:
            log.exception("epoch %d ends", stream.epoch)
            self.end(stream, error)
        finally:
            stream.executed()

    def _run(
        self, stream: SchedulerStream, runner: ModelRunner, frame: StepInput, queue_us: int
    ) -> None:
        """Launches the frame's steps one by one, until the end or the first cancelled step."""
        for step in frame.steps():
            # A stream that is over computes nothing more: a replaced scheduler cannot write blocks.
            if stream.is_over:
                return
            is_taken_back = not stream.begin(step)
            if stream.is_over:  # ended during the wait
                return
            if is_taken_back:
                self._skip_rest(runner, frame, step)
                return
            launched = self._launch(stream, runner, step, queue_us)
            answer = partial(self._answer, stream, launched, step)
            if runner.is_asynchronous:
                self._answers.post(answer)
            else:
                answer()
            queue_us = 0  # the other steps of a grant are not queued

    def _skip_rest(self, runner: ModelRunner, frame: StepInput, step: StepInput) -> None:
        """Computes no further step of the frame; applies its changes if its first step did not."""
        if not frame.granted_steps:
            raise BadStep("cut", f"step {step.step_id} was not granted")
        if step is frame:
            self._ranks.apply_changes()
            applied = runner.launch(frame.changes(), 0)
            if isinstance(applied, StepOutput) and applied.error:
                raise RuntimeError(f"the changes of step {step.step_id}: {applied.error}")
        self._ranks.forget_rows()
        runner.state.forget_rows()

    def _launch(
        self, stream: SchedulerStream, runner: ModelRunner, step: StepInput, queue_us: int
    ) -> StepOutput | Pending:
        if refusal := stream.refusal(step):
            self._ranks.forget_rows()
            runner.state.forget_rows()
            return failed(step.step_id, refusal)
        with self._step_limit.over(step.step_id, step.num_tokens):
            if stream.faults:
                stream.faults.before_step()
            self._ranks.compute_step()
            launched = runner.launch(step, queue_us)
        if stream.faults:
            stream.faults.after_step(lambda: runner.records[-1].request_ids)
        if isinstance(launched, StepOutput):
            stream.note_failure(launched)  # the next step may come before the answer
        return launched

    def _answer(
        self, stream: SchedulerStream, launched: StepOutput | Pending, step: StepInput
    ) -> None:
        with self._step_limit.over(step.step_id, step.num_tokens):
            output = launched if isinstance(launched, StepOutput) else launched.result()
        with self._lock:
            if self._stream is stream:
                self._last_step_id = output.step_id
        profile = self._lifecycle.ready_runner().recording
        sending_ns = 0 if profile is None else time.perf_counter_ns()
        stream.answer(output)
        sent_ns = 0 if profile is None else time.perf_counter_ns()
        if not isinstance(launched, StepOutput):
            launched.record(output)
        if profile is not None:
            profile.sent(step.step_id, sending_ns, sent_ns)
