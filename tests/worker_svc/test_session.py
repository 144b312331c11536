"""The stream's rules without gRPC: what follows a failure, what an ended stream may still do."""

import threading
from collections.abc import Iterator
from queue import Empty

import numpy as np
import pytest

from pagewire.v1 import worker_pb2
from rpc.columns import pack
from worker_svc.codec import Hello
from worker_svc.compute_thread import ComputeThread
from worker_svc.session import (
    MAX_FRAMES_IN_FLIGHT,
    MAX_STEPS_LAUNCHED,
    Session,
    StaleEpoch,
    Stopping,
    Stream,
    TakenOver,
)
from worker_svc.step import BadStep, Limits, StepInput, StepOutput

LIMITS = Limits(
    num_blocks=9,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=16,
    vocab_size=50,
)


class FakeState:
    def __init__(self) -> None:
        self.num_forgotten = 0

    def forget_rows(self) -> None:
        self.num_forgotten += 1


class FakeRunner:
    """Answers every step, fails those it is told to, and can be held up."""

    def __init__(self) -> None:
        self.limits = LIMITS
        self.state = FakeState()
        self.failing: set[int] = set()
        self.executed: list[int] = []
        self.freed: list[int] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.is_asynchronous = False

    def launch(self, step: StepInput, queue_us: int) -> StepOutput:
        self.has_begun.set()
        self.entered.release()
        assert self.gate.wait(10)
        if not step.same_rows and len(step.freed_slots):
            self.freed += step.freed_slots.tolist()
        self.executed.append(step.step_id)
        error = "broken" if step.step_id in self.failing else ""
        return StepOutput(step.step_id, np.zeros(0, dtype=np.int32), error=error)


class FakeLifecycle:
    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def ready_runner(self) -> FakeRunner:
        return self._runner


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def session(runner: FakeRunner) -> Iterator[Session]:
    compute, answers = ComputeThread(), ComputeThread("answers")
    yield Session(FakeLifecycle(runner), compute, answers)
    runner.gate.set()
    assert compute.stop(5)
    assert answers.stop(5)


def attach(session: Session, epoch: int) -> Stream:
    return session.attach(Hello(protocol_version=1, epoch=epoch, first_step_id=1))


def submit(
    session: Session, stream: Stream, step_id: int, ack: int = 0, reset: bool = False
) -> None:
    step = worker_pb2.SchedulerOutput(step_id=step_id, ack_step_id=ack, reset=reset or step_id == 1)
    stream.wait_for_room()
    session.submit(stream, worker_pb2.AttachRequest(step=step).SerializeToString())


def receive(stream: Stream) -> tuple[int, str]:
    frame = stream.outbox.get(timeout=10)
    assert isinstance(frame, bytes)
    output = worker_pb2.AttachResponse.FromString(frame).output
    return output.step_id, output.error


def test_a_step_planned_before_a_failure_was_known_fails_with_it(
    session: Session, runner: FakeRunner
) -> None:
    runner.failing = {2}
    stream = attach(session, 1)
    submit(session, stream, 1)
    assert receive(stream) == (1, "")
    submit(session, stream, 2, ack=1)
    submit(session, stream, 3, ack=1)
    assert receive(stream) == (2, "broken")
    assert receive(stream) == (3, "planned before the failure of step 2 was known")
    # This one knows of step 2 but not that step 3 failed as well.
    submit(session, stream, 4, ack=2)
    assert receive(stream) == (4, "planned before the failure of step 3 was known")
    submit(session, stream, 5, ack=4)
    assert receive(stream) == (5, "")
    assert runner.executed == [1, 2, 5]


def test_a_reset_needs_no_knowledge_of_failures(session: Session, runner: FakeRunner) -> None:
    runner.failing = {1}
    stream = attach(session, 1)
    submit(session, stream, 1)
    submit(session, stream, 2, reset=True)
    assert [receive(stream), receive(stream)] == [(1, "broken"), (2, "")]


def test_steps_queued_by_a_replaced_scheduler_never_run(
    session: Session, runner: FakeRunner
) -> None:
    runner.gate.clear()
    old = attach(session, 1)
    submit(session, old, 1)
    submit(session, old, 2)
    new = attach(session, 2)
    submit(session, new, 1)
    runner.gate.set()
    assert receive(new) == (1, "")
    # The first may have been running already; the second was not.
    assert runner.executed in ([1, 1], [1])
    assert isinstance(old.outbox.get(timeout=10), TakenOver)


def test_the_reader_waits_while_as_many_steps_as_may_are_in_flight(
    session: Session, runner: FakeRunner
) -> None:
    runner.gate.clear()
    stream = attach(session, 1)
    for step_id in range(1, MAX_FRAMES_IN_FLIGHT + 1):
        submit(session, stream, step_id)
    beyond = threading.Thread(target=submit, args=(session, stream, MAX_FRAMES_IN_FLIGHT + 1))
    beyond.start()
    beyond.join(0.1)
    assert beyond.is_alive()
    runner.gate.set()
    beyond.join(10)
    answered = [receive(stream)[0] for _ in range(MAX_FRAMES_IN_FLIGHT + 1)]
    assert answered == list(range(1, MAX_FRAMES_IN_FLIGHT + 2))


def test_an_end_frees_a_waiting_reader(session: Session, runner: FakeRunner) -> None:
    runner.gate.clear()
    stream = attach(session, 1)
    for step_id in range(1, MAX_FRAMES_IN_FLIGHT + 1):
        submit(session, stream, step_id)
    reader = threading.Thread(target=stream.wait_for_room)
    reader.start()
    session.end(stream, None)
    reader.join(10)
    assert not reader.is_alive()


def test_epochs_only_rise_even_after_their_stream_has_ended(session: Session) -> None:
    stream = attach(session, 7)
    session.end(stream, None)
    for epoch in (7, 6):
        with pytest.raises(StaleEpoch, match=f"epoch {epoch} is not higher than 7"):
            attach(session, epoch)
    attach(session, 8)


def test_a_stopping_worker_ends_its_stream_and_takes_no_other(session: Session) -> None:
    stream = attach(session, 1)
    session.stop()
    assert isinstance(stream.outbox.get(timeout=10), Stopping)
    with pytest.raises(Stopping):
        attach(session, 2)


def test_an_end_that_comes_second_changes_nothing(session: Session) -> None:
    old = attach(session, 1)
    new = attach(session, 2)
    session.end(old, None)
    submit(session, new, 1)
    assert receive(new) == (1, "")
    assert isinstance(old.outbox.get(timeout=10), TakenOver)
    assert old.outbox.empty()


class Flight:
    """A step under way that ends when its runner's gate opens."""

    def __init__(self, runner: "SlowRunner", output: StepOutput) -> None:
        self._runner = runner
        self._output = output

    def result(self) -> StepOutput:
        assert self._runner.gate.wait(10)
        return self._output

    def record(self, output: StepOutput) -> None:
        self._runner.recorded.append(output.step_id)


class SlowRunner(FakeRunner):
    """Launches at once, and a launch that fails is known at once; results take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asynchronous = True
        self.launched = threading.Semaphore(0)
        self.recorded: list[int] = []

    def launch(self, step: StepInput, queue_us: int) -> StepOutput | Flight:
        self.executed.append(step.step_id)
        self.launched.release()
        error = "broken" if step.step_id in self.failing else ""
        output = StepOutput(step.step_id, np.zeros(0, dtype=np.int32), error=error)
        return output if error else Flight(self, output)


@pytest.fixture
def slow_runner(runner: FakeRunner) -> SlowRunner:
    return SlowRunner()


@pytest.fixture
def slow_session(slow_runner: SlowRunner) -> Iterator[Session]:
    compute, answers = ComputeThread(), ComputeThread("answers")
    yield Session(FakeLifecycle(slow_runner), compute, answers)
    slow_runner.gate.set()
    assert compute.stop(5)
    assert answers.stop(5)


def test_a_step_is_launched_before_the_one_ahead_of_it_is_done(
    slow_session: Session, slow_runner: SlowRunner
) -> None:
    slow_runner.gate.clear()
    stream = attach(slow_session, 1)
    submit(slow_session, stream, 1)
    submit(slow_session, stream, 2)
    for _ in range(2):
        assert slow_runner.launched.acquire(timeout=10)
    assert stream.outbox.empty()
    slow_runner.gate.set()
    assert [receive(stream), receive(stream)] == [(1, ""), (2, "")]
    slow_session.finish(stream)
    assert stream.outbox.get(timeout=10) is None
    assert slow_runner.recorded == [1, 2]


def test_a_launch_that_fails_is_answered_in_its_turn_and_takes_its_successor_along(
    slow_session: Session, slow_runner: SlowRunner
) -> None:
    slow_runner.failing = {2}
    slow_runner.gate.clear()
    stream = attach(slow_session, 1)
    submit(slow_session, stream, 1)
    submit(slow_session, stream, 2)
    for _ in range(2):
        assert slow_runner.launched.acquire(timeout=10)
    slow_runner.gate.set()
    assert [receive(stream), receive(stream)] == [(1, ""), (2, "broken")]
    submit(slow_session, stream, 3, ack=1)
    assert receive(stream) == (3, "planned before the failure of step 2 was known")
    assert slow_runner.executed == [1, 2]


def test_a_scheduler_is_greeted_once_the_step_of_the_one_before_is_over(
    session: Session, runner: FakeRunner
) -> None:
    runner.gate.clear()
    old = attach(session, 1)
    submit(session, old, 1)
    assert runner.has_begun.wait(10)
    new = attach(session, 2)
    session.greet(new, b"hello")
    with pytest.raises(Empty):
        new.outbox.get(timeout=0.1)
    runner.gate.set()
    assert new.next_frame() == b"hello"


def test_a_heartbeat_says_which_step_runs_and_what_was_received(
    session: Session, runner: FakeRunner
) -> None:
    hello = Hello(protocol_version=1, epoch=1, first_step_id=1, heartbeat_interval_s=0.02)
    stream = session.attach(hello)
    session.greet(stream, b"hello")
    assert stream.next_frame() == b"hello"
    runner.gate.clear()
    submit(session, stream, 1)
    while not (beat := heartbeat(stream)).running_step_id:
        pass
    assert (beat.running_step_id, beat.num_frames_received, beat.num_frames_sent) == (1, 1, 0)
    assert heartbeat(stream).running_ms > beat.running_ms
    runner.gate.set()
    output = worker_pb2.AttachResponse.FromString(stream.next_frame() or b"")
    assert output.HasField("output")
    beat = heartbeat(stream)
    assert (beat.running_step_id, beat.num_frames_sent) == (0, 1)


def heartbeat(stream: Stream) -> worker_pb2.Heartbeat:
    frame = worker_pb2.AttachResponse.FromString(stream.next_frame() or b"")
    assert frame.HasField("heartbeat")
    return frame.heartbeat


# --- grants --------------------------------------------------------------------------------------


def submit_grant(
    session: Session, stream: Stream, step_id: int, num_steps: int, freed: tuple[int, ...] = ()
) -> None:
    step = worker_pb2.SchedulerOutput(
        step_id=step_id, granted_steps=num_steps, freed_slots=pack(list(freed))
    )
    stream.wait_for_room()
    session.submit(stream, worker_pb2.AttachRequest(step=step).SerializeToString())


def cut(session: Session, stream: Stream, first: int, last: int) -> None:
    message = worker_pb2.Cut(first_step_id=first, last_step_id=last)
    assert session.cut(stream, worker_pb2.AttachRequest(cut=message).SerializeToString())


def receive_skipped(stream: Stream) -> tuple[int, int]:
    frame = stream.outbox.get(timeout=10)
    assert isinstance(frame, bytes)
    response = worker_pb2.AttachResponse.FromString(frame)
    assert response.HasField("skipped")
    return response.skipped.first_step_id, response.skipped.last_step_id


def started(session: Session) -> Stream:
    """A stream whose first step, the reset, is answered."""
    stream = attach(session, 1)
    submit(session, stream, 1)
    assert receive(stream) == (1, "")
    return stream


def test_every_step_of_a_grant_is_answered(session: Session, runner: FakeRunner) -> None:
    stream = started(session)
    submit_grant(session, stream, 2, 3)
    submit(session, stream, 5, ack=1)
    assert [receive(stream) for _ in range(4)] == [(2, ""), (3, ""), (4, ""), (5, "")]
    assert runner.executed == [1, 2, 3, 4, 5]


def test_a_cut_is_answered_at_once_and_ends_the_grant_behind_the_step_under_way(
    session: Session, runner: FakeRunner
) -> None:
    stream = started(session)
    assert runner.entered.acquire(timeout=10)
    runner.gate.clear()
    submit_grant(session, stream, 2, 4)
    submit_grant(session, stream, 6, 3, freed=(1,))
    assert runner.entered.acquire(timeout=10)  # step 2 is under way
    cut(session, stream, 2, 8)
    assert receive_skipped(stream) == (3, 8), "while step 2 still runs"
    submit(session, stream, 9, ack=1)
    runner.gate.set()
    assert [receive(stream), receive(stream)] == [(2, ""), (9, "")]
    assert runner.executed == [1, 2, 6, 9]
    assert runner.freed == [1], "the changes of a grant that is skipped apply"
    assert runner.state.num_forgotten == 2


def test_a_second_cut_does_not_revive_what_the_first_took_back(
    session: Session, runner: FakeRunner
) -> None:
    stream = started(session)
    assert runner.entered.acquire(timeout=10)
    runner.gate.clear()
    submit_grant(session, stream, 2, 2)
    submit_grant(session, stream, 4, 2)
    assert runner.entered.acquire(timeout=10)
    cut(session, stream, 2, 5)
    submit_grant(session, stream, 6, 2)
    cut(session, stream, 6, 7)
    assert [receive_skipped(stream), receive_skipped(stream)] == [(3, 5), (6, 7)]
    runner.gate.set()
    assert receive(stream) == (2, "")
    submit(session, stream, 8, ack=2)
    assert receive(stream) == (8, "")


def test_a_cut_that_comes_late_skips_nothing(session: Session, runner: FakeRunner) -> None:
    stream = started(session)
    submit_grant(session, stream, 2, 2)
    assert [receive(stream), receive(stream)] == [(2, ""), (3, "")]
    cut(session, stream, 2, 3)
    assert receive_skipped(stream) == (4, 3)


def test_a_step_that_was_not_granted_cannot_be_cut(session: Session) -> None:
    stream = started(session)
    cut(session, stream, 2, 2)
    assert receive_skipped(stream) == (2, 2)
    submit(session, stream, 2, ack=1)
    with pytest.raises(BadStep, match="cut: step 2 was not granted"):
        raise stream.outbox.get(timeout=10)


def test_a_cut_that_names_no_range_ends_the_stream(session: Session) -> None:
    stream = started(session)
    cut(session, stream, 3, 2)
    with pytest.raises(BadStep, match="cut: steps 3 to 2 are no range"):
        raise stream.outbox.get(timeout=10)


def test_a_failed_step_fails_the_rest_of_its_grant(session: Session, runner: FakeRunner) -> None:
    runner.failing = {3}
    stream = started(session)
    submit_grant(session, stream, 2, 4)
    assert receive(stream) == (2, "")
    assert receive(stream) == (3, "broken")
    assert receive(stream) == (4, "planned before the failure of step 3 was known")
    assert receive(stream) == (5, "planned before the failure of step 4 was known")
    assert runner.executed == [1, 2, 3]


def test_a_replaced_scheduler_s_grant_ends_with_the_step_under_way(
    session: Session, runner: FakeRunner
) -> None:
    old = started(session)
    assert runner.entered.acquire(timeout=10)
    runner.gate.clear()
    submit_grant(session, old, 2, 8)
    assert runner.entered.acquire(timeout=10)
    new = attach(session, 2)
    submit(session, new, 1)
    runner.gate.set()
    assert receive(new) == (1, "")
    assert runner.executed == [1, 2, 1]


def test_no_more_of_a_grant_is_launched_than_three_steps_ahead_of_the_answers(
    slow_session: Session, slow_runner: SlowRunner
) -> None:
    stream = started(slow_session)
    assert slow_runner.launched.acquire(timeout=10)
    slow_runner.gate.clear()
    submit_grant(slow_session, stream, 2, 8)
    for _ in range(MAX_STEPS_LAUNCHED):
        assert slow_runner.launched.acquire(timeout=10)
    assert not slow_runner.launched.acquire(timeout=0.05)
    cut(slow_session, stream, 2, 9)
    assert receive_skipped(stream) == (5, 9)
    slow_runner.gate.set()
    assert [receive(stream)[0] for _ in range(3)] == [2, 3, 4]
