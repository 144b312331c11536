"""What cannot go with a beam search is refused by its name, before anything is submitted."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from tests.gateway.http_calls import refusal
from tests.gateway.outputs.random_model import RandomModel, generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODY = {"prompt": [3, 4, 5], "max_tokens": 9, "use_beam_search": True, "n": 4}
TURNS = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def model(running: Any) -> Iterator[RandomModel]:
    yield RandomModel(running.scheduler)
    del running.scheduler._answer


@pytest.mark.parametrize(
    ("route", "field", "fields"),
    [
        (COMPLETION, "n", {"n": 17}),
        (COMPLETION, "n", {"n": 0}),
        (COMPLETION, "n", {"n": 0, "best_of": 2}),
        (COMPLETION, "n", {"n": 3, "best_of": 2}),
        (COMPLETION, "best_of", {"n": 1, "best_of": 17}),
        (COMPLETION, "best_of", {"n": 0, "best_of": 0}),
        (COMPLETION, "length_penalty", {"length_penalty": 11}),
        (COMPLETION, "n", {"n": 16, "stop_token_ids": list(range(2, 20))}),
        (COMPLETION, "use_beam_search", {"stream": True}),
        (COMPLETION, "temperature", {"temperature": 0.5}),
        (COMPLETION, "top_p", {"top_p": 0.5}),
        (COMPLETION, "top_k", {"top_k": 5}),
        (COMPLETION, "min_p", {"min_p": 0.5}),
        (COMPLETION, "min_tokens", {"min_tokens": 1}),
        (COMPLETION, "presence_penalty", {"presence_penalty": 1}),
        (COMPLETION, "frequency_penalty", {"frequency_penalty": 1}),
        (COMPLETION, "repetition_penalty", {"repetition_penalty": 1.1}),
        (COMPLETION, "logit_bias", {"logit_bias": {"5": 1}}),
        (COMPLETION, "allowed_token_ids", {"allowed_token_ids": [5]}),
        (COMPLETION, "logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [5]}),
        (COMPLETION, "bad_words", {"bad_words": ["a"]}),
        (COMPLETION, "stop", {"stop": "a"}),
        (COMPLETION, "echo", {"echo": True}),
        (COMPLETION, "prompt_logprobs", {"prompt_logprobs": 1}),
        (COMPLETION, "guided_regex", {"guided_regex": "a"}),
        (CHAT, "response_format", {"response_format": {"type": "json_object"}}),
        (CHAT, "tools", {"tools": [TOOL]}),
        (CHAT, "thinking_token_budget", {"thinking_token_budget": 5}),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    route: str, field: str, fields: dict[str, Any], running: Any, model: RandomModel
) -> None:
    body = BODY | fields
    if route == CHAT:
        body = {"messages": TURNS, "use_beam_search": True, "n": 2} | fields
    status, param, _ = await refusal(running, route, body)
    assert (status, param) == (400, field)
    assert not running.scheduler.submits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("beam_search.num_beams", {"beam_search": pb.BeamSearch()}),
        ("beam_search.num_beams", {"beam_search": pb.BeamSearch(num_beams=17)}),
        ("beam_search.length_penalty", {"length_penalty": 100.0}),
        ("early_stopping", {"early_stopping": 9}),
        ("n", {"n": 3}),
    ],
)
async def test_grpc_calls_name_the_field_at_fault(
    name: str, options: dict[str, Any], running: Any, model: RandomModel
) -> None:
    own = {key: options.pop(key) for key in ("length_penalty", "early_stopping") if key in options}
    options = {"beam_search": pb.BeamSearch(num_beams=2, **own)} | options
    with pytest.raises(grpc.aio.AioRpcError, match=rf"^(?s:.*){name}: ") as error:
        await generate(running, **options)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not running.scheduler.submits


@pytest.mark.parametrize("is_chat", [False, True])
async def test_streams_are_refused_by_name(is_chat: bool, running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(beam_search=pb.BeamSearch(num_beams=2))
    if is_chat:
        turn = pb.ChatMessage(role="user", content="Hello")
        call: Any = stub.ChatStream(pb.ChatStreamRequest(messages=[turn], options=options))
    else:
        prompt = pb.Prompt(text="Hello")
        call = stub.GenerateStream(pb.GenerateStreamRequest(prompt=prompt, options=options))
    with pytest.raises(grpc.aio.AioRpcError, match=r"beam_search\.num_beams: .* streamed"):
        async for _ in call:
            pass
