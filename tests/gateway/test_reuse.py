"""Options for sharing the KV of a prompt and for drafts, from every API to the scheduler."""

from typing import Any

import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_salt_and_opting_out_reach_the_scheduler(route: str, running: Any) -> None:
    for fields, salt, skips in (
        ({}, "", False),
        ({"cache_salt": "red"}, "red", False),
        ({"skip_prefix_cache": True}, "", True),
    ):
        response = await running.http.post(route, json=ROUTES[route] | fields)
        assert response.status_code == 200
        submit = running.scheduler.submits[-1]
        assert (submit.cache_salt, submit.skip_prefix_cache) == (salt, skips)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("skips", [None, False, True])
async def test_opting_out_of_speculation_reaches_the_scheduler(
    route: str, skips: bool | None, running: Any
) -> None:
    fields = {} if skips is None else {"skip_speculation": skips}
    response = await running.http.post(route, json=ROUTES[route] | fields)
    assert response.status_code == 200
    assert running.scheduler.submits[-1].sampling.skip_speculation is bool(skips)


@pytest.mark.parametrize("salt", ["", "ä" * 129, 5])
async def test_a_salt_that_is_none_is_refused_by_name(salt: Any, running: Any) -> None:
    body = ROUTES["/v1/completions"] | {"cache_salt": salt}
    response = await running.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


async def test_a_grpc_call_carries_both(running: Any) -> None:
    options = pb.GenerationOptions(
        sampling=types_pb2.SamplingParams(max_tokens=4, skip_speculation=True),
        cache_salt="red",
        skip_prefix_cache=True,
    )
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello"), options=options))
    submit = running.scheduler.submits[-1]
    assert (submit.cache_salt, submit.skip_prefix_cache) == ("red", True)
    assert submit.sampling.skip_speculation
