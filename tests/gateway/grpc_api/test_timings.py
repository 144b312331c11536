"""Answers over gRPC say where their time went."""

from typing import Any

import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import scheduler_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.conftest import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = pb.Prompt(text="Hello")


async def streamed(running: Running, **options: Any) -> list[pb.OutputDelta]:
    stub: Any = InferenceServiceStub(running.channel)
    made = pb.GenerationOptions(**options)
    request = pb.GenerateStreamRequest(prompt=PROMPT, options=made)
    return [message.delta async for message in stub.GenerateStream(request)]


def check(timings: pb.OutputTimings) -> None:
    assert 0 < timings.first_token_s <= timings.total_s
    assert 0 <= timings.per_token_s <= timings.total_s


async def test_an_answer_has_the_times_of_its_gateway(running: Running) -> None:
    stub: Any = InferenceServiceStub(running.channel)
    whole = await stub.Generate(pb.GenerateRequest(prompt=PROMPT))
    check(whole.output.timings)
    assert not whole.output.timings.HasField("queue_s"), "this scheduler admits without a word"
    *pieces, last = await streamed(running)
    check(last.timings)
    assert not any(piece.HasField("timings") for piece in pieces)


async def test_the_queue_is_the_time_until_the_scheduler_lets_a_request_run(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = running.scheduler._answer

    def admit_and_answer(submit: Any, outbox: Any) -> None:
        admitted = scheduler_pb2.Admitted(handle=submit.handle)
        outbox.put_nowait(scheduler_pb2.SessionResponse(admitted=[admitted]))
        answer(submit, outbox)

    monkeypatch.setattr(running.scheduler, "_answer", admit_and_answer)
    timings = (await streamed(running))[-1].timings
    assert timings.HasField("queue_s")
    assert 0 <= timings.queue_s <= timings.first_token_s


async def test_a_resumed_output_has_no_times(running: Running, encode: Any) -> None:
    known = encode("Hello world")[:2]
    last = (await streamed(running, resume_token_ids=known))[-1]
    assert last.finish_reason and not last.HasField("timings")
