"""Numbers at the edges of their types, in every field of every public call: never INTERNAL."""

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from pagewire.v1 import debug_pb2, debug_pb2_grpc, embedding_pb2, embedding_pb2_grpc
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc as stubs
from tests.edges import edges_of, name_of, numbers_in, with_number
from tests.gateway.conftest import Running
from tests.gateway.outputs.random_model import RandomModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = pb.Prompt(text="Hello")
TURNS = [pb.ChatMessage(role="user", content="Hello")]
ALLOWED = (
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
)


def _calls(running: Running) -> dict[str, tuple[Any, Message]]:
    """Every method, by name, and a request that it answers."""
    inference = stubs.InferenceServiceStub(running.channel)
    embedding = embedding_pb2_grpc.EmbeddingServiceStub(running.channel)
    return {
        "Generate": (inference.Generate, pb.GenerateRequest(prompt=PROMPT)),
        "GenerateStream": (inference.GenerateStream, pb.GenerateStreamRequest(prompt=PROMPT)),
        "Chat": (inference.Chat, pb.ChatRequest(messages=TURNS)),
        "ChatStream": (inference.ChatStream, pb.ChatStreamRequest(messages=TURNS)),
        "Tokenize": (inference.Tokenize, pb.TokenizeRequest(text="Hello")),
        "Detokenize": (inference.Detokenize, pb.DetokenizeRequest(token_ids=[3])),
        "ListModels": (inference.ListModels, pb.ListModelsRequest()),
        "Embed": (embedding.Embed, embedding_pb2.EmbedRequest(inputs=[PROMPT])),
    }


async def _code(call: Any, request: Message) -> tuple[grpc.StatusCode, str]:
    try:
        answer = call(request)
        if isinstance(answer, grpc.aio.UnaryStreamCall):
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_every_method_is_tried(running: Running) -> None:
    methods = {
        method.name
        for file in (pb.DESCRIPTOR, embedding_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods == set(_calls(running))


async def test_every_call_answers_every_edge(running: Running) -> None:
    running.scheduler.output = []  # it knows no log probabilities, but for rounds of beams

    def is_plain(submit: Any, outbox: Any) -> bool:
        is_round = submit.sampling.logprobs and submit.sampling.ignore_eos
        if not is_round:
            type(running.scheduler)._answer(running.scheduler, submit, outbox)
        return not is_round

    RandomModel(running.scheduler, disturb=is_plain)
    for name, (call, request) in _calls(running).items():
        for path in numbers_in(request.DESCRIPTOR):
            for value in edges_of(path[-1]):
                code, details = await _code(call, with_number(request, path, value))
                what = f"{name} {name_of(path)} = {value}: {code} {details}"
                assert code in ALLOWED, what
                is_named = any(step.name.removesuffix("s") in details for step in path)
                # A conversation of one number has no turns.
                assert code is grpc.StatusCode.OK or is_named or "messages: is" in details, what


async def test_bytes_that_are_no_message_are_an_invalid_argument(running: Running) -> None:
    for name in _calls(running):
        service = "EmbeddingService" if name == "Embed" else "InferenceService"
        kind = "unary_stream" if name.endswith("Stream") else "unary_unary"
        raw = getattr(running.channel, kind)(f"/pagewire.v1.{service}/{name}")
        code, details = await _code(raw, b"\xff\xff\xff")  # type: ignore[arg-type]
        assert code is grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {code} {details}"
        assert "not a valid protobuf message" in details


async def test_an_unknown_field_of_a_newer_client_is_no_error(running: Running) -> None:
    raw = running.channel.unary_unary("/pagewire.v1.InferenceService/ListModels")
    code, details = await _code(raw, b"\xf8\x3f\x01")  # type: ignore[arg-type]
    assert code is grpc.StatusCode.OK, details


async def test_the_debug_service_answers_every_edge(running: Running) -> None:
    debug: Any = debug_pb2_grpc.DebugServiceStub(running.channel)
    request = debug_pb2.ListRequestsRequest()
    for path in numbers_in(request.DESCRIPTOR):
        for value in edges_of(path[-1]):
            code, details = await _code(debug.ListRequests, with_number(request, path, value))
            assert code in ALLOWED, f"{name_of(path)} = {value}: {details}"


async def test_a_priority_is_refused_where_the_policy_ignores_it(running: Running) -> None:
    inference: Any = stubs.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(priority=7)
    body = {"prompt": "Hello", "priority": 7}
    running.scheduler.policy = "fcfs"
    await running.until_policy("fcfs")
    code, details = await _code(
        inference.Generate, pb.GenerateRequest(prompt=PROMPT, options=options)
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT and details.startswith("priority: 7 ")
    response = await running.http.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "priority"
    assert (await running.http.post("/v1/completions", json=body | {"priority": 0})).is_success
    running.scheduler.policy = "priority"
    await running.until_policy("priority")
    assert (await running.http.post("/v1/completions", json=body)).is_success
