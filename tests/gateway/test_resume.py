"""Resumed streams: text, stops and usage are as without a break."""

from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc

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
