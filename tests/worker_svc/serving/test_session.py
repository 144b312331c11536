"""Rules of the step stream without gRPC: after failures, and after the end of a stream."""

import threading
from queue import Empty

import pytest

from pagewire.v1 import worker_pb2
from tests.pace import patience
from tests.worker_svc.session_fakes import LIMITS, FakeRunner, SlowRunner, attach, receive, submit
from wire.columns import pack
from worker_svc.protocol.codec import Hello
from worker_svc.protocol.preparations import decode_orders
from worker_svc.protocol.step import BadStep
from worker_svc.serving.scheduler_stream import MAX_FRAMES_IN_FLIGHT, SchedulerStream
from worker_svc.serving.session import Session
from worker_svc.serving.session_errors import (
    StaleEpoch,
    Stopping,
    TakenOver,
)


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
    # This step acknowledges step 2, but not the failure of step 3.
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
    # The first step may have been running already, the second not.
    assert runner.executed in ([1, 1], [1])
    assert isinstance(old.outbox.get(timeout=patience(10)), TakenOver)


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
    beyond.join(patience(10))
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
    reader.join(patience(10))
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
    assert isinstance(stream.outbox.get(timeout=patience(10)), Stopping)
    with pytest.raises(Stopping):
        attach(session, 2)


def test_an_end_that_comes_second_changes_nothing(session: Session) -> None:
    old = attach(session, 1)
    new = attach(session, 2)
    session.end(old, None)
    submit(session, new, 1)
    assert receive(new) == (1, "")
    assert isinstance(old.outbox.get(timeout=patience(10)), TakenOver)
    assert old.outbox.empty()


def test_a_step_is_launched_before_the_one_ahead_of_it_is_done(
    slow_session: Session, slow_runner: SlowRunner
) -> None:
    slow_runner.gate.clear()
    stream = attach(slow_session, 1)
    submit(slow_session, stream, 1)
    submit(slow_session, stream, 2)
    for _ in range(2):
        assert slow_runner.launched.acquire(timeout=patience(10))
    assert stream.outbox.empty()
    slow_runner.gate.set()
    assert [receive(stream), receive(stream)] == [(1, ""), (2, "")]
    slow_session.finish(stream)
    assert stream.outbox.get(timeout=patience(10)) is None
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
        assert slow_runner.launched.acquire(timeout=patience(10))
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
    assert runner.has_begun.wait(patience(10))
    new = attach(session, 2)
    session.greet(new, b"hello")
    with pytest.raises(Empty):
        new.outbox.get(timeout=0.1)
    runner.gate.set()
    assert new.next_frame() == b"hello"


def test_a_heartbeat_says_which_step_runs_and_what_was_received(
    session: Session, runner: FakeRunner
) -> None:
    hello = Hello(protocol_version=2, epoch=1, first_step_id=1, heartbeat_interval_s=0.02)
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


def heartbeat(stream: SchedulerStream) -> worker_pb2.Heartbeat:
    frame = worker_pb2.AttachResponse.FromString(stream.next_frame() or b"")
    assert frame.HasField("heartbeat")
    return frame.heartbeat


def test_grammars_are_prepared_for_the_stream_that_asks_and_forgotten_with_the_next(
    session: Session, runner: FakeRunner
) -> None:
    stream, grammars = attach(session, 1), runner.state.grammars
    asked = worker_pb2.PrepareGrammars(dropped_ids=[5])
    asked.preparations.add(preparation_id=6, grammar="good", output_token_ids=pack([3, 4]))
    asked.preparations.add(preparation_id=7, grammar="bad one")
    assert session.prepare(stream, worker_pb2.AttachRequest(prepare=asked).SerializeToString())
    answers = [worker_pb2.AttachResponse.FromString(stream.next_frame() or b"") for _ in range(2)]
    told = [(a.grammar_prepared.preparation_id, a.grammar_prepared.problem) for a in answers]
    assert told == [(6, ""), (7, "bad one")]
    (orders,) = grammars.orders
    assert orders.dropped_ids == (5,)
    assert [order.output_token_ids.tolist() for order in orders.grammars] == [[3, 4], []]
    session.greet(attach(session, 2), b"hello")
    session.submit(stream, b"")  # the compute thread is past the greeting once this ran
    session._compute.call(lambda: None)
    assert grammars.num_forgotten == 1


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"grammar": ""}, "it is empty"),
        ({"grammar": "a", "output_token_ids": pack([99])}, "not below"),
        ({"grammar": "a", "output_token_ids": pack([-1])}, "not below"),
    ],
)
def test_a_preparation_that_cannot_be_is_refused_alone(
    wanted: dict[str, object], problem: str
) -> None:
    asked = worker_pb2.GrammarPreparation(preparation_id=3, **wanted)  # type: ignore[arg-type]
    fine = worker_pb2.GrammarPreparation(preparation_id=4, grammar="a")
    frame = worker_pb2.AttachRequest(prepare=worker_pb2.PrepareGrammars(preparations=[asked, fine]))
    orders = decode_orders(frame.SerializeToString(), LIMITS)
    assert orders is not None
    bad, good = orders.grammars
    assert problem in bad.refusal and not good.refusal


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"preparation_id": 0, "grammar": "a"}, "preparation_id"),
        ({"preparation_id": 1, "grammar": "a", "output_token_ids": b"x"}, "output_token_ids"),
    ],
)
def test_a_preparation_out_of_range_ends_the_stream(
    session: Session, wanted: dict[str, object], field: str
) -> None:
    stream = attach(session, 1)
    asked = worker_pb2.PrepareGrammars(preparations=[worker_pb2.GrammarPreparation(**wanted)])  # type: ignore[arg-type]
    assert session.prepare(stream, worker_pb2.AttachRequest(prepare=asked).SerializeToString())
    with pytest.raises(BadStep, match=field):
        stream.next_frame()
