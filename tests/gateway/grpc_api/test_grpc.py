"""InferenceService, DebugService, health and reflection over a real port."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import debug_pb2, debug_pb2_grpc, inference_pb2_grpc, types_pb2
from pagewire.v1 import inference_pb2 as pb
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONVERSATION = [pb.ChatMessage(role="user", content="Hello")]
PROMPT = pb.Prompt(text="Hello")


@pytest.fixture
def stub(running: Any) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(running.channel)


def calls(stub: Any, options: pb.GenerationOptions) -> dict[str, Callable[..., Any]]:
    """The four generating RPCs, each started with the same options."""
    return {
        "Generate": lambda **k: stub.Generate(
            pb.GenerateRequest(prompt=PROMPT, options=options), **k
        ),
        "GenerateStream": lambda **k: stub.GenerateStream(
            pb.GenerateStreamRequest(prompt=PROMPT, options=options), **k
        ),
        "Chat": lambda **k: stub.Chat(pb.ChatRequest(messages=CONVERSATION, options=options), **k),
        "ChatStream": lambda **k: stub.ChatStream(
            pb.ChatStreamRequest(messages=CONVERSATION, options=options), **k
        ),
    }


async def outcome(call: Any) -> list[Any]:
    """The messages of a call; one for a unary call."""
    if isinstance(call, grpc.aio.UnaryUnaryCall):
        return [await call]
    return [message async for message in call]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await outcome(call)
    return error.value


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    fields = []
    for detail in status.details:
        bad = BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return fields


@pytest.mark.parametrize("name", ["Generate", "Chat"])
async def test_a_whole_output_comes_with_its_tokens_and_counts(
    name: str, stub: Any, running: Any
) -> None:
    options = pb.GenerationOptions(request_id="mine", model="tiny")
    (response,) = await outcome(calls(stub, options)[name]())
    assert (response.request_id, response.model) == ("mine", "tiny")
    output = response.output
    assert output.text == "Hello world"
    assert list(output.token_ids) == running.scheduler.output
    assert output.finish_reason == types_pb2.FINISH_REASON_STOP
    assert not output.HasField("stop_string") and not output.HasField("stop_token_id")
    assert output.usage.cached_tokens == 3
    assert running.scheduler.submits[0].request_id == "mine"


@pytest.mark.parametrize("name", ["GenerateStream", "ChatStream"])
async def test_a_streamed_output_ends_with_its_reason(name: str, stub: Any, running: Any) -> None:
    messages = await outcome(calls(stub, pb.GenerationOptions())[name]())
    deltas = [message.delta for message in messages]
    assert "".join(delta.text for delta in deltas) == "Hello world"
    assert [i for delta in deltas for i in delta.token_ids] == running.scheduler.output
    reasons = [delta.finish_reason for delta in deltas]
    assert reasons[-1] == types_pb2.FINISH_REASON_STOP
    assert not any(reasons[:-1]) and not any(delta.HasField("usage") for delta in deltas[:-1])
    assert len({message.request_id for message in messages}) == 1
    assert messages[0].request_id and messages[0].model == "tiny"


async def test_token_ids_are_used_as_they_are(stub: Any, running: Any) -> None:
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[7, 8, 9]))
    await stub.Generate(pb.GenerateRequest(prompt=prompt))
    assert running.scheduler.prompt_of(0) == [7, 8, 9]


@pytest.mark.parametrize("name", ["Generate", "ChatStream"])
async def test_a_stop_string_cuts_text_and_tokens_and_aborts(
    name: str, stub: Any, running: Any, encode: Any, tokenizer: Any, eventually: Any
) -> None:
    scheduler = running.scheduler
    scheduler.output = encode("The capital of France is Paris. And more.")
    scheduler.hangs_after = len(scheduler.output)
    scheduler.tokens_per_step = 3
    options = pb.GenerationOptions(stop=["Never", "Paris"])
    messages = await outcome(calls(stub, options)[name]())
    pieces = [m.output if name == "Generate" else m.delta for m in messages]
    last = pieces[-1]
    token_ids = [i for piece in pieces for i in piece.token_ids]
    assert "".join(piece.text for piece in pieces) == "The capital of France is "
    assert (last.finish_reason, last.stop_string) == (types_pb2.FINISH_REASON_STOP, "Paris")
    assert token_ids == scheduler.output[: len(token_ids)]
    assert last.usage.completion_tokens == len(token_ids)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    shorter = tokenizer.decode(token_ids[:-1], skip_special_tokens=True)
    assert "Paris" in whole and "Paris" not in shorter
    await eventually(lambda: scheduler.aborted == [scheduler.submits[0].handle], "an abort")


@pytest.mark.parametrize("tokens", [0, 1])
async def test_cancelling_a_call_aborts_its_request(
    tokens: int, stub: Any, running: Any, eventually: Any
) -> None:
    scheduler = running.scheduler
    scheduler.hangs_after = tokens
    for number, start in enumerate(calls(stub, pb.GenerationOptions()).values(), start=1):
        call = start()
        reading = asyncio.create_task(outcome(call))
        await eventually(lambda n=number: len(scheduler.submits) == n, "a submit")
        assert len(scheduler.aborted) == number - 1
        call.cancel()
        await eventually(lambda n=number: len(scheduler.aborted) == n, "an abort")
        await asyncio.gather(reading, return_exceptions=True)
    assert scheduler.aborted == [submit.handle for submit in scheduler.submits]


async def test_a_deadline_aborts_its_request(stub: Any, running: Any, eventually: Any) -> None:
    scheduler = running.scheduler
    scheduler.hangs_after = 1
    for number, start in enumerate(calls(stub, pb.GenerationOptions()).values(), start=1):
        error = await refusal(start(timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda n=number: len(scheduler.aborted) == n, "an abort")
    assert running.gateway._pipeline.live == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sampling": {"temperature": 3}}, "temperature"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"top_p": 0}}, "top_p"),
        ({"sampling": {"top_k": -2}}, "top_k"),
        ({"sampling": {"min_p": 2}}, "min_p"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling": {"max_tokens": 1, "min_tokens": 2}}, "min_tokens"),
        ({"sampling": {"stop_token_ids": [10**9]}}, "stop_token_ids"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"request_id": "x" * 257}, "request_id"),
    ],
)
async def test_a_bad_option_is_refused_by_name(
    options: dict[str, Any], field: str, stub: Any, running: Any
) -> None:
    for start in calls(stub, pb.GenerationOptions(**options)).values():
        error = await refusal(start())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(f"{field}: ")
        assert fields_of(error) == [field]
    assert running.scheduler.submits == []


async def test_bad_inputs_are_refused_by_name(stub: Any) -> None:
    too_long = pb.Prompt(token_ids=pb.TokenIds(ids=[5] * 256))
    unknown = pb.Prompt(token_ids=pb.TokenIds(ids=[10**9]))
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for call, code, field in [
        (stub.Generate(pb.GenerateRequest()), invalid, "prompt"),
        (stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text=""))), invalid, "prompt"),
        (stub.Generate(pb.GenerateRequest(prompt=unknown)), invalid, "prompt"),
        (stub.Generate(pb.GenerateRequest(prompt=too_long)), invalid, "prompt"),
        (stub.Chat(pb.ChatRequest()), invalid, "messages"),
        (stub.Chat(pb.ChatRequest(messages=[pb.ChatMessage()])), invalid, "messages[0].role"),
        (stub.Tokenize(pb.TokenizeRequest()), invalid, "input"),
        (stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**9])), invalid, "token_ids"),
    ]:
        error = await refusal(call)
        assert error.code() is code, error
        assert fields_of(error) == [field]


async def test_what_never_fits_the_workers_blocks_is_no_different(stub: Any, running: Any) -> None:
    """A scheduler says it with a status of its own."""
    running.scheduler.refuse(grpc.StatusCode.FAILED_PRECONDITION, "needs 9 KV blocks")
    for start in calls(stub, pb.GenerationOptions()).values():
        error = await refusal(start())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "needs 9 KV blocks"
    response = await running.http.post("/v1/completions", json={"prompt": "Hello"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_an_unknown_model_is_not_found(stub: Any) -> None:
    for start in calls(stub, pb.GenerationOptions(model="other")).values():
        assert (await refusal(start())).code() is grpc.StatusCode.NOT_FOUND


async def test_a_full_queue_says_when_to_come_back(stub: Any, running: Any) -> None:
    running.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    for start in calls(stub, pb.GenerationOptions()).values():
        error = await refusal(start())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "the queue is full"
        details = dict(error.trailing_metadata())["grpc-status-details-bin"]
        (detail,) = Status.FromString(details).details
        retry = RetryInfo()
        assert detail.Unpack(retry) and retry.retry_delay.seconds >= 1


async def test_texts_become_ids_and_ids_texts(stub: Any, encode: Any) -> None:
    response = await stub.Tokenize(pb.TokenizeRequest(text="Hello 😀"))
    assert list(response.token_ids) == encode("Hello 😀")
    assert response.max_model_len == 256
    conversation = pb.Conversation(messages=CONVERSATION)
    response = await stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert list(response.token_ids) == encode(rendered)
    for skip, expected in ((False, rendered), (True, "user\nHello\nassistant\n")):
        request = pb.DetokenizeRequest(token_ids=response.token_ids, skip_special_tokens=skip)
        assert (await stub.Detokenize(request)).text == expected


async def test_the_served_model_is_described(stub: Any, running: Any) -> None:
    response = await stub.ListModels(pb.ListModelsRequest())
    assert list(response.models) == [running.scheduler.model]


async def test_the_debug_service_describes_a_live_request(
    stub: Any, running: Any, eventually: Any
) -> None:
    debug = debug_pb2_grpc.DebugServiceStub(running.channel)
    running.scheduler.hangs_after = 1
    options = pb.GenerationOptions(
        request_id="seen", sampling=types_pb2.SamplingParams(temperature=0.5), stop=["secret"]
    )
    call = stub.GenerateStream(pb.GenerateStreamRequest(prompt=PROMPT, options=options))
    await call.read()

    listed = await debug.ListRequests(debug_pb2.ListRequestsRequest())
    (summary,) = listed.requests
    assert (summary.request_id, summary.state, summary.num_output_tokens) == ("seen", "running", 1)
    described = await debug.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id="seen"))
    assert "temperature 0.5" in described.sampling and "1 stop strings" in described.sampling
    assert "first token" in described.story[-1]
    assert "Hello" not in str(described) and "secret" not in str(described)

    call.cancel()
    await eventually(lambda: running.gateway._pipeline.live == [], "the end of the request")
    gone = debug.DescribeRequest(debug_pb2.DescribeRequestRequest(request_id="seen"))
    assert (await refusal(gone)).code() is grpc.StatusCode.NOT_FOUND


async def test_what_a_gateway_does_not_know_it_says_who_does(running: Any) -> None:
    debug = debug_pb2_grpc.DebugServiceStub(running.channel)
    for call in (
        debug.DumpBlockPool(debug_pb2.DumpBlockPoolRequest()),
        debug.ListSteps(debug_pb2.ListStepsRequest()),
    ):
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "ask the scheduler" in error.details()


async def test_a_bug_is_an_internal_error_that_tells_nothing(
    stub: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(running.gateway._pipeline, "_output_text", broken)
    for start in calls(stub, pb.GenerationOptions()).values():
        error = await refusal(start())
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
    for stream in (False, True):
        body = {"prompt": "Hello", "stream": stream}
        response = await running.http.post("/v1/completions", json=body)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert response.headers["connection"] == "close"  # as the server does
        assert "secret" not in response.text
    assert running.gateway._pipeline.live == []


async def test_a_health_watcher_does_not_hold_up_the_end(
    start: Callable[..., Any], eventually: Any
) -> None:
    running = await start(drain_timeout_s=patience(20))
    health = health_pb2_grpc.HealthStub(running.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    async with asyncio.timeout(patience(5)):
        ending = asyncio.create_task(running.gateway.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await ending


async def test_live_streams_end_before_the_gateway_does_and_new_ones_are_refused(
    start: Callable[..., Any], eventually: Any
) -> None:
    running = await start()
    running.scheduler.hangs_after = 1
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    request = pb.GenerateStreamRequest(prompt=PROMPT)
    call = stub.GenerateStream(request)
    assert (await call.read()).delta.text
    ending = asyncio.create_task(running.gateway.stop())
    await asyncio.sleep(0.2)
    assert (await refusal(stub.GenerateStream(request))).code() is grpc.StatusCode.UNAVAILABLE
    running.scheduler.finish_hanging()
    assert (await call.read()).delta.finish_reason == types_pb2.FINISH_REASON_STOP
    await ending


async def test_health_follows_the_scheduler(running: Any) -> None:
    health = health_pb2_grpc.HealthStub(running.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", "pagewire.v1.InferenceService"):
        request = health_pb2.HealthCheckRequest(service=name)
        assert (await health.Check(request)).status == serving
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
    async with asyncio.timeout(patience(10)):
        assert (await watch.read()).status == serving
        running.scheduler.is_ready = False
        assert (await watch.read()).status == not_serving
        running.scheduler.is_ready = True
        assert (await watch.read()).status == serving
    watch.cancel()


async def test_a_worker_that_is_away_is_not_ready_but_requests_may_wait_for_it(
    stub: Any, running: Any, eventually: Any
) -> None:
    running.scheduler.is_ready = False
    await eventually(lambda: not running.gateway._readiness.current.is_ready, "not ready")
    response = await stub.Generate(pb.GenerateRequest(prompt=PROMPT))
    assert response.output.text == "Hello world"


async def test_calls_need_the_key_and_health_and_reflection_do_not(
    start: Callable[..., Any],
) -> None:
    running = await start(api_key="s3cret")
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    debug = debug_pb2_grpc.DebugServiceStub(running.channel)
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "s3cret"),)):
        for start_call in calls(stub, pb.GenerationOptions()).values():
            error = await refusal(start_call(metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        call = debug.ListRequests(debug_pb2.ListRequestsRequest(), metadata=metadata)
        assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
    right = (("authorization", "Bearer s3cret"),)
    for start_call in calls(stub, pb.GenerationOptions()).values():
        assert await outcome(start_call(metadata=right))
    health = health_pb2_grpc.HealthStub(running.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status
    assert "pagewire.v1.InferenceService" in await grpcurl(running.grpc_target, "list")


async def grpcurl(target: str, *command: str) -> str:
    program = shutil.which("grpcurl") or str(Path(sys.executable).parent / "grpcurl")
    process = await asyncio.create_subprocess_exec(
        program, "-plaintext", target, *command, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(patience(20)):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_grpcurl_finds_its_way_by_reflection(running: Any) -> None:
    listed = (await grpcurl(running.grpc_target, "list")).split()
    assert {
        "grpc.health.v1.Health",
        "pagewire.v1.DebugService",
        "pagewire.v1.InferenceService",
    } <= set(listed)
    described = await grpcurl(
        running.grpc_target, "describe", "pagewire.v1.InferenceService.ChatStream"
    )
    assert "stream .pagewire.v1.ChatStreamResponse" in described
