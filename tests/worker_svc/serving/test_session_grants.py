"""Grants on a stream: the worker continues alone until a cut, and skips the named steps."""

import pytest

from pagewire.v1 import worker_pb2
from tests.pace import patience
from tests.worker_svc.session_fakes import FakeRunner, SlowRunner, attach, receive, submit
from wire.columns import pack
from worker_svc.protocol.step import BadStep
from worker_svc.serving.scheduler_stream import MAX_STEPS_LAUNCHED, SchedulerStream
from worker_svc.serving.session import Session


def submit_grant(
    session: Session,
    stream: SchedulerStream,
    step_id: int,
    num_steps: int,
    freed: tuple[int, ...] = (),
) -> None:
    step = worker_pb2.SchedulerOutput(
        step_id=step_id, granted_steps=num_steps, freed_slots=pack(list(freed))
    )
    stream.wait_for_room()
    session.submit(stream, worker_pb2.AttachRequest(step=step).SerializeToString())


def cut(session: Session, stream: SchedulerStream, first: int, last: int) -> None:
    message = worker_pb2.Cut(first_step_id=first, last_step_id=last)
    assert session.cut(stream, worker_pb2.AttachRequest(cut=message).SerializeToString())


def receive_skipped(stream: SchedulerStream) -> tuple[int, int]:
    frame = stream.outbox.get(timeout=patience(10))
    assert isinstance(frame, bytes)
    response = worker_pb2.AttachResponse.FromString(frame)
    assert response.HasField("skipped")
    return response.skipped.first_step_id, response.skipped.last_step_id


def started(session: Session) -> SchedulerStream:
    """A stream with its first step, the reset, answered."""
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
    assert runner.entered.acquire(timeout=patience(10))
    runner.gate.clear()
    submit_grant(session, stream, 2, 4)
    submit_grant(session, stream, 6, 3, freed=(1,))
    assert runner.entered.acquire(timeout=patience(10))  # step 2 is running
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
    assert runner.entered.acquire(timeout=patience(10))
    runner.gate.clear()
    submit_grant(session, stream, 2, 2)
    submit_grant(session, stream, 4, 2)
    assert runner.entered.acquire(timeout=patience(10))
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
        raise stream.outbox.get(timeout=patience(10))


def test_a_cut_that_names_no_range_ends_the_stream(session: Session) -> None:
    stream = started(session)
    cut(session, stream, 3, 2)
    with pytest.raises(BadStep, match="cut: steps 3 to 2 are no range"):
        raise stream.outbox.get(timeout=patience(10))


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
    assert runner.entered.acquire(timeout=patience(10))
    runner.gate.clear()
    submit_grant(session, old, 2, 8)
    assert runner.entered.acquire(timeout=patience(10))
    new = attach(session, 2)
    submit(session, new, 1)
    runner.gate.set()
    assert receive(new) == (1, "")
    assert runner.executed == [1, 2, 1]


def test_no_more_of_a_grant_is_launched_than_three_steps_ahead_of_the_answers(
    slow_session: Session, slow_runner: SlowRunner
) -> None:
    stream = started(slow_session)
    assert slow_runner.launched.acquire(timeout=patience(10))
    slow_runner.gate.clear()
    submit_grant(slow_session, stream, 2, 8)
    for _ in range(MAX_STEPS_LAUNCHED):
        assert slow_runner.launched.acquire(timeout=patience(10))
    assert not slow_runner.launched.acquire(timeout=0.05)
    cut(slow_session, stream, 2, 9)
    assert receive_skipped(stream) == (5, 9)
    slow_runner.gate.set()
    assert [receive(stream)[0] for _ in range(3)] == [2, 3, 4]
