"""Resumed streams: text, stops and usage are as without a break."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.scheduler.readiness import Readiness
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "naïve 😀🎉 café: fibonacci(n - 1) and so on, then more"


def request(token_ids: list[int] = [], **options: Any) -> pb.GenerateStreamRequest:  # noqa: B006
    made = pb.GenerateStreamRequest(prompt=pb.Prompt(text="Hello"))
    made.options.MergeFrom(pb.GenerationOptions(resume_token_ids=token_ids, **options))
    return made


async def read(running: Any, wanted: pb.GenerateStreamRequest) -> list[pb.OutputDelta]:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    return [message.delta async for message in stub.GenerateStream(wanted)]


@pytest.mark.parametrize("stop", [[], [" so on,"]])
async def test_wherever_it_broke_both_parts_make_up_the_whole(
    running: Any, encode: Any, stop: list[str]
) -> None:
    running.scheduler.output = encode(TEXT)
    whole = await read(running, request(stop=stop))
    token_ids = [token_id for delta in whole for token_id in delta.token_ids]
    assert len(token_ids) > 10
    for count in range(len(token_ids)):
        seen, shown = 0, ""
        for delta in whole:
            if seen + len(delta.token_ids) > count:
                break
            seen, shown = seen + len(delta.token_ids), shown + delta.text
        rest = await read(running, request(token_ids[:seen], stop=stop))
        assert shown + "".join(d.text for d in rest) == "".join(d.text for d in whole)
        assert token_ids[:seen] + [i for d in rest for i in d.token_ids] == token_ids
        assert rest[-1].stop_string == whole[-1].stop_string
        assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens


async def test_of_several_outputs_only_what_is_missing_of_each_is_sent(
    running: Any, encode: Any
) -> None:
    running.scheduler.output = encode(TEXT)
    token_ids = encode(TEXT)
    known = [pb.ResumedOutput(is_finished=True), pb.ResumedOutput(token_ids=token_ids[:7])]
    sampling = {"temperature": 1.0, "seed": 5}
    rest = await read(running, request(n=2, sampling=sampling, resume_outputs=known))
    assert {delta.index for delta in rest} == {1}
    assert [i for delta in rest for i in delta.token_ids] == token_ids[7:]
    whole = await read(running, request(n=2, sampling=sampling))
    seeds = [submit.sampling.seed for submit in running.scheduler.submits]
    assert seeds[0] == seeds[2] != seeds[1]
    assert {delta.index for delta in whole} == {0, 1}


@pytest.mark.parametrize(
    ("n", "known", "problem"),
    [(3, 2, "2 entries, one for each of 3"), (1, 2, "2 entries, one for each of 1")],
)
async def test_as_many_outputs_are_resumed_as_were_asked_for(
    running: Any, n: int, known: int, problem: str
) -> None:
    entries = [pb.ResumedOutput(token_ids=[5])] * known
    with pytest.raises(grpc.aio.AioRpcError, match="resume_outputs") as error:
        await read(running, request(n=n, sampling={"temperature": 1.0}, resume_outputs=entries))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in error.value.details()


async def test_a_resumed_stream_waits_for_a_worker_that_is_coming_and_a_new_one_does_not(
    start: Any, encode: Any
) -> None:
    running = await start(wait=False)
    running.scheduler.output = encode(TEXT)
    model = running.scheduler.model
    running.scheduler.model = None
    running.gateway._readiness.current = Readiness(False, "no worker yet", None)
    resumed = asyncio.create_task(read(running, request(encode(TEXT)[:5])))
    await asyncio.sleep(0.3)
    with pytest.raises(grpc.aio.AioRpcError, match="no worker"):
        await read(running, request())
    assert not resumed.done()
    running.scheduler.model = model
    async with asyncio.timeout(patience(10)):
        assert (await resumed)[-1].finish_reason


async def test_the_scheduler_hears_which_tokens_are_output(running: Any, encode: Any) -> None:
    running.scheduler.output = encode(TEXT)
    known, prompt = encode(TEXT)[:5], encode("Hello")
    await read(running, request(known))
    (submit,) = running.scheduler.submits
    assert running.scheduler.prompt_of(0) == prompt + known
    assert submit.num_prompt_tokens == len(prompt)
    assert submit.resumed_by_client


async def test_only_the_first_scheduler_hears_that_a_client_resumed_it(
    running: Any, encode: Any
) -> None:
    running.scheduler.output = encode(TEXT)
    running.scheduler.breaks_after = 3
    await read(running, request(encode(TEXT)[:5]))
    first, *later = running.scheduler.submits
    assert first.resumed_by_client and later
    assert not any(submit.resumed_by_client for submit in later)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (request([1, 2], n=2), "resume_token_ids: is for one output, not for 2"),
        (request([1, 10_000]), "resume_token_ids: 10000 is outside the vocabulary"),
    ],
)
async def test_what_cannot_go_on_is_refused_by_name(
    running: Any, wanted: pb.GenerateStreamRequest, problem: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=problem) as error:
        await read(running, wanted)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert running.scheduler.submits == []


async def test_a_whole_answer_cannot_be_resumed(running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(resume_token_ids=[1])
    with pytest.raises(grpc.aio.AioRpcError, match="resume_token_ids: is for streams"):
        await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
