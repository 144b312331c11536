"""The step stream over gRPC: refusals with their status, after which the worker still serves."""

import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from pagewire.v1 import worker_pb2
from tests.pace import paced
from tests.worker_svc.conftest import VOCAB_SIZE, Attachment, Worker, make_sequence
from wire.columns import pack, unpack

BAD_SEQUENCES: list[tuple[str, dict[str, object]]] = [
    ("slot", {"slot": 4}),
    ("token_ids", {"token_ids": b""}),
    ("token_ids", {"token_ids": b"abc"}),
    ("token_ids", {"token_ids": pack([5] * 193)}),
    ("num_prompt_tokens", {"num_prompt_tokens": 0}),
    ("num_prompt_tokens", {"num_prompt_tokens": 4}),
    ("num_computed_tokens", {"num_computed_tokens": 3}),
    ("block_ids", {"block_ids": pack([0])}),
    ("block_ids", {"block_ids": pack([64])}),
    ("block_ids", {"block_ids": pack([1] * 13)}),
    ("block_ids", {"block_ids": b"12"}),
    ("block_ids", {"block_ids": b"", "num_computed_tokens": 1}),
]
BAD_ROWS: list[tuple[str, dict[str, object]]] = [
    ("token_ids", {"token_ids": pack([5, 6, VOCAB_SIZE])}),
    ("token_ids", {"token_ids": pack([-1, 6, 7])}),
    ("sampling.top_p", {"sampling": worker_pb2.RowSampling()}),
    ("sampling.top_p", {"sampling": worker_pb2.RowSampling(top_p=1.5)}),
    ("sampling.temperature", {"sampling": worker_pb2.RowSampling(top_p=1, temperature=-1)}),
    (
        "sampling.temperature",
        {"sampling": worker_pb2.RowSampling(top_p=1, temperature=float("nan"))},
    ),
    ("sampling.min_p", {"sampling": worker_pb2.RowSampling(top_p=1, min_p=2)}),
    (
        "sampling.stop_token_ids",
        {"sampling": worker_pb2.RowSampling(top_p=1, stop_token_ids=[VOCAB_SIZE])},
    ),
    (
        "sampling.stop_token_ids",
        {"sampling": worker_pb2.RowSampling(top_p=1, stop_token_ids=range(VOCAB_SIZE))},
    ),
]
BAD_STEPS: list[tuple[str, dict[str, object]]] = [
    ("freed_slots: slot 9", {"freed_slots": [9]}),
    ("freed_slots: slot 1 is empty", {"freed_slots": [1]}),
    ("freed_slots: a slot appears twice", {"freed_slots": [0, 0]}),
    ("freed_slots: 3 bytes", {"freed_slots": b"abc"}),
    ("new_sequences[0].slot", {"new_sequences": [make_sequence(0, [5], [3])]}),
    ("appended_slots: slot -1", {"appended_slots": [-1], "appended_block_ids": [3]}),
    ("appended_slots: slot 2 is empty", {"appended_slots": [2], "appended_block_ids": [3]}),
    ("appended_slots", {"appended_slots": [0] * 11, "appended_block_ids": [3] * 11}),
    ("appended_block_ids: block 0", {"appended_slots": [0], "appended_block_ids": [0]}),
    ("appended_block_ids", {"appended_slots": [0], "appended_block_ids": [3, 4]}),
    ("slots: slot 4", {"slots": [4]}),
    ("slots: slot 3 is empty", {"slots": [3]}),
    ("slots: a slot appears twice", {"slots": [0, 0]}),
    ("slots", {"slots": b"12"}),
    ("slots: must be empty", {"slots": [0], "same_rows": True}),
    ("num_scheduled: 0", {"slots": [0], "num_scheduled": [0]}),
    ("num_scheduled: -1", {"slots": [0], "num_scheduled": [-1]}),
    ("num_scheduled: slot 0 has fewer", {"slots": [0], "num_scheduled": [4]}),
    ("num_scheduled: 97 tokens", {"slots": [0], "num_scheduled": [97]}),
    ("num_scheduled: 2 counts", {"slots": [0], "num_scheduled": [1, 1]}),
    ("num_scheduled: must be empty", {"num_scheduled": [1], "same_rows": True}),
]


@pytest.mark.parametrize(("field", "fields"), BAD_SEQUENCES)
def test_a_bad_sequence_is_refused_by_name(
    worker: Worker, field: str, fields: dict[str, object]
) -> None:
    attachment = worker.attach()
    attachment.send(new_sequences=[make_sequence(0, [5, 6, 7], [1], **fields)])
    assert_refused_and_alive(worker, attachment, f"new_sequences[0].{field}")


@pytest.mark.parametrize(("field", "fields"), BAD_ROWS)
def test_a_bad_row_is_refused_by_name_and_the_other_rows_go_on(
    worker: Worker, field: str, fields: dict[str, object]
) -> None:
    both = [3, 3]
    good = make_sequence(1, [5, 6, 7], [2])
    (token_id,) = worker.attach().step(new_sequences=[good], slots=[1], num_scheduled=[3])
    attachment = worker.attach()
    bad = make_sequence(0, [5, 6, 7], [1], **fields)
    attachment.send(new_sequences=[bad, good], slots=[0, 1], num_scheduled=both)
    output = attachment.receive()
    assert output.row_status == bytes([worker_pb2.ROW_STATUS_REFUSED, 0])
    assert unpack(output.token_ids).tolist()[1] == token_id
    (error,) = output.row_errors
    assert error.row == 0 and error.message.startswith(f"{field}: ")
    assert len(attachment.step(freed_slots=[0], slots=[1])) == 1
    attachment.close()


@pytest.mark.parametrize(("field", "fields"), BAD_STEPS)
def test_a_bad_step_is_refused_by_name(
    worker: Worker, field: str, fields: dict[str, object]
) -> None:
    attachment = worker.attach()
    attachment.step(new_sequences=[make_sequence(0, [5, 6, 7], [1, 2])])
    attachment.send(**fields)
    assert_refused_and_alive(worker, attachment, field)


def test_a_row_without_blocks_for_its_tokens_is_refused(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send(new_sequences=[make_sequence(0, [5] * 17, [1])], slots=[0], num_scheduled=[17])
    assert_refused_and_alive(worker, attachment, "num_scheduled: slot 0 has too few blocks")


@pytest.mark.parametrize("frame", [b"\xff\xff\xff", b"", worker_pb2.AttachRequest()])
def test_bytes_that_are_no_step_are_refused(
    worker: Worker, frame: bytes | worker_pb2.AttachRequest
) -> None:
    attachment = worker.attach()
    attachment.send_raw(frame)
    assert_refused_and_alive(worker, attachment, "frame")


def test_a_second_hello_is_refused(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send_raw(worker_pb2.AttachRequest(hello=worker_pb2.Hello()))
    assert_refused_and_alive(worker, attachment, "frame")


def test_the_first_step_must_reset(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send(reset=False)
    assert_refused_and_alive(worker, attachment, "reset")


def test_same_rows_needs_rows_before_it(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.step(new_sequences=[make_sequence(0, [5, 6, 7], [1, 2])], slots=[0])
    attachment.send(same_rows=True, freed_slots=[0])
    assert_refused_and_alive(worker, attachment, "same_rows: slot 0 is empty")


def assert_refused_and_alive(worker: Worker, attachment: Attachment, message: str) -> None:
    assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert attachment.call.details().startswith(message)
    following = worker.attach()
    tokens = following.step(
        new_sequences=[make_sequence(0, [5, 6], [1])], slots=[0], num_scheduled=[2]
    )
    assert len(tokens) == 1
    following.close()


def test_a_higher_epoch_takes_over_and_the_older_stream_is_aborted(worker: Worker) -> None:
    older = worker.attach()
    older.step(new_sequences=[make_sequence(0, [5, 6], [1])], slots=[0], num_scheduled=[2])
    newer = worker.attach()
    assert older.status() is grpc.StatusCode.ABORTED
    newer.step(new_sequences=[make_sequence(0, [5, 6], [1])])
    assert worker.describe().last_step_id == 1


def test_an_epoch_seen_before_is_refused_and_the_stream_in_place_goes_on(worker: Worker) -> None:
    attachment = worker.attach()
    epoch = worker.describe().epoch
    for stale in (epoch, epoch - 1, 0):
        intruder = Attachment(worker.channel, stale)
        assert intruder.status() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"epoch {stale}" in intruder.call.details()
    assert attachment.step() == []


def test_another_protocol_version_is_refused_by_number(worker: Worker) -> None:
    attachment = worker.attach()
    call = worker.channel.stream_stream(
        "/pagewire.v1.WorkerService/Attach",
        request_serializer=worker_pb2.AttachRequest.SerializeToString,
        response_deserializer=worker_pb2.AttachResponse.FromString,
    )(iter([worker_pb2.AttachRequest(hello=worker_pb2.Hello(protocol_version=1, epoch=1 << 40))]))
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol_version 1" in call.details()
    assert attachment.step() == []


def test_a_gap_in_step_ids_aborts_and_the_next_attach_works(worker: Worker) -> None:
    for step_id in (1, 3):
        attachment = worker.attach()
        attachment.step()
        attachment.send(step_id=step_id)
        assert attachment.status() is grpc.StatusCode.ABORTED
        assert "expected 2" in attachment.call.details()
    assert worker.attach().step() == []


def test_a_scheduler_that_vanishes_leaves_the_worker_attachable(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.step(new_sequences=[make_sequence(0, [5], [1])])
    attachment.cancel()
    assert worker.attach().step() == []


def test_a_half_closed_stream_still_gets_its_last_outputs(worker: Worker) -> None:
    attachment = worker.attach()
    attachment.send(new_sequences=[make_sequence(0, [5], [1])], slots=[0])
    attachment._outbox.put(None)
    outputs = [response.output for response in attachment.call]
    assert [output.step_id for output in outputs] == [1]
    assert attachment.call.code() is grpc.StatusCode.OK


def test_a_worker_with_nothing_to_send_sends_heartbeats_to_who_asked(worker: Worker) -> None:
    attachment = worker.attach(heartbeat_interval_ms=20)
    beats = [next(attachment.call) for _ in range(3)]
    assert [beat.WhichOneof("frame") for beat in beats] == ["heartbeat"] * 3
    attachment.send(new_sequences=[make_sequence(0, [5, 6], [1])], slots=[0], num_scheduled=[2])
    while not (frame := next(attachment.call)).HasField("output"):
        pass
    assert frame.output.step_id == 1
    beat = next(attachment.call).heartbeat
    assert (beat.num_frames_received, beat.num_frames_sent, beat.running_step_id) == (1, 1, 0)


def test_who_did_not_ask_gets_no_heartbeats(worker: Worker) -> None:
    attachment = worker.attach()
    time.sleep(0.1)
    attachment.send()
    assert next(attachment.call).HasField("output")


def test_a_stream_without_hello_is_ended_and_frees_its_thread(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.serving.service.HELLO_TIMEOUT_S", paced(0.2))
    silent = threading.Event()
    with grpc.insecure_channel(worker.address) as channel:
        call = channel.stream_stream("/pagewire.v1.WorkerService/Attach")(
            frame
            for frame in iter(silent.wait, True)  # ends with the test
        )
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        silent.set()
    assert ended.value.code() is grpc.StatusCode.CANCELLED


def test_however_many_streams_are_opened_without_a_word_a_new_scheduler_attaches(
    worker: Worker,
) -> None:
    """Streams of methods that need no key, and step streams without a hello."""
    reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    watch, attach = "/grpc.health.v1.Health/Watch", "/pagewire.v1.WorkerService/Attach"
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with grpc.insecure_channel(worker.address) as channel:
        calls = [channel.stream_stream(name)(silent()) for name in (reflect, attach) * 40]
        calls += [channel.unary_stream(watch)(b"") for _ in range(40)]
        attachment = worker.attach()
        assert attachment.step() == []
        attachment.close()
        for call in calls:
            call.cancel()
        over.set()
