"""A worker that was asked to end: what it tells its scheduler, what it takes, when it ends."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import worker_pb2
from tests.pace import paced, patience
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, make_sequence, serving
from tests.worker_svc.session_fakes import FakeRunner, attach, submit
from wire.versions import STEP_MINOR
from worker_svc.protocol.codec import Hello
from worker_svc.serving.server import DRAIN_QUIET_S
from worker_svc.serving.session import Session
from worker_svc.serving.session_errors import Stopping

LONG_S = patience(30)


@pytest.fixture
def worker(llama_folder: Path) -> Iterator[Worker]:
    """A worker of its own for each test: none can be taken back from a drain."""
    with serving(WORKER_CONFIG, llama_folder) as ready:
        yield ready


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_a_busy_stream_is_told_at_once_and_ends_the_drain_itself(
    worker: Worker, pool: ThreadPoolExecutor
) -> None:
    attachment = worker.attach(protocol_minor=STEP_MINOR)  # it asked for no heartbeats
    attachment.step(
        new_sequences=[make_sequence(0, [5, 6, 7], [1, 2])], slots=[0], num_scheduled=[3]
    )
    draining = pool.submit(worker.server.drain, LONG_S, threading.Event())
    told = next(attachment.call)
    assert told.heartbeat.is_draining and told.heartbeat.num_frames_sent == 1
    for _ in range(3):  # the requests that run finish
        assert len(attachment.step(slots=[0], num_scheduled=[1])) == 1
    with pytest.raises(grpc.RpcError) as refused:
        worker.attach()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in refused.value.details()
    # It pauses for longer than one without a word would be given, and is not cut off.
    time.sleep(paced(DRAIN_QUIET_S) + 0.5)
    assert not draining.done()
    attachment.close()
    draining.result(patience(10))


def test_a_scheduler_of_an_older_version_gets_no_word_and_the_drain_ends_in_silence(
    worker: Worker, pool: ThreadPoolExecutor
) -> None:
    attachment = worker.attach(heartbeat_interval_ms=20)
    draining = pool.submit(worker.server.drain, LONG_S, threading.Event())
    assert not any(next(attachment.call).heartbeat.is_draining for _ in range(10))
    draining.result(patience(10))


@pytest.mark.parametrize("is_hurried", [True, False])
def test_a_second_signal_or_the_time_ends_a_drain(
    worker: Worker, pool: ThreadPoolExecutor, is_hurried: bool
) -> None:
    attachment = worker.attach(protocol_minor=STEP_MINOR)
    hurry = threading.Event()
    draining = pool.submit(worker.server.drain, LONG_S if is_hurried else 0.2, hurry)
    if is_hurried:
        time.sleep(0.1)
        assert not draining.done()
        hurry.set()
    draining.result(patience(10))
    attachment.cancel()


def test_without_a_scheduler_a_drain_ends_at_once(worker: Worker) -> None:
    worker.server.drain(LONG_S, threading.Event())


def test_what_is_left_when_the_time_is_up_ends_with_a_word_of_a_planned_end(
    worker: Worker,
) -> None:
    attachment = worker.attach(protocol_minor=STEP_MINOR)
    worker.server.drain(0.05, threading.Event())
    worker.server.stop(0.2)
    assert attachment.status() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in attachment.call.details()


def test_a_stream_that_was_not_greeted_yet_is_told_after_its_greeting(
    session: Session, runner: FakeRunner
) -> None:
    stream = session.attach(Hello(2, epoch=1, first_step_id=1, protocol_minor=STEP_MINOR))
    session.drain()
    stream.greet(b"greeting")
    assert stream.next_frame() == b"greeting"
    frame = stream.next_frame()
    assert frame is not None
    heartbeat = worker_pb2.AttachResponse.FromString(frame).heartbeat
    assert heartbeat.is_draining and heartbeat.num_frames_sent == 0
    with pytest.raises(Stopping):
        attach(session, 2)
    submit(session, stream, 1)
    frame = stream.next_frame()
    assert frame is not None
    assert worker_pb2.AttachResponse.FromString(frame).output.step_id == 1
