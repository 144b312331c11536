"""Priority, tenant, deadline and retry times of requests."""

from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


async def post(
    running: Any, route: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    response: httpx.Response = await running.http.post(
        route, json=ROUTES[route] | fields, headers=headers
    )
    return response


@pytest.mark.parametrize("route", ROUTES)
async def test_the_header_names_the_tenant_and_user_does_when_there_is_none(
    route: str, running: Any
) -> None:
    for headers, fields, tenant in (
        ({}, {}, ""),
        ({}, {"user": "ann"}, "ann"),
        ({"x-tenant": "acme"}, {}, "acme"),
        ({"x-tenant": "acme"}, {"user": "ann"}, "acme"),
    ):
        assert (await post(running, route, headers, **fields)).status_code == 200
        assert running.scheduler.submits[-1].tenant == tenant


@pytest.mark.parametrize("route", ROUTES)
async def test_priority_and_timeout_reach_the_scheduler(route: str, running: Any) -> None:
    assert (await post(running, route)).status_code == 200
    submit = running.scheduler.submits[-1]
    assert (submit.priority, submit.HasField("timeout_s")) == (0, False)
    assert (await post(running, route, {"x-timeout-s": "2.5"}, priority=-7)).status_code == 200
    submit = running.scheduler.submits[-1]
    assert (submit.priority, submit.timeout_s) == (-7, 2.5)


@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({"x-tenant": "t" * 65}, {}, "x-tenant"),
        ({}, {"user": 5}, "user"),
        ({}, {"priority": 2**31}, "priority"),
        ({}, {"priority": "high"}, "priority"),
        ({"x-timeout-s": "soon"}, {}, "x-timeout-s"),
        ({"x-timeout-s": "0"}, {}, "x-timeout-s"),
        ({"x-timeout-s": "inf"}, {}, "x-timeout-s"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    headers: dict[str, str], fields: dict[str, Any], name: str, running: Any
) -> None:
    response = await post(running, "/v1/chat/completions", headers, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("route", ROUTES)
async def test_a_caller_may_name_the_request_and_so_come_back_under_its_id(
    route: str, running: Any
) -> None:
    response = await post(running, route, {"x-request-id": "mine"})
    assert response.json()["id"] == running.scheduler.submits[-1].request_id == "mine"
    replaced = await post(running, route, {"x-request-id": "x" * 257})
    assert replaced.status_code == 200 and "xx" not in replaced.json()["id"]


async def test_a_refusal_for_overload_says_when_to_come_again(running: Any) -> None:
    running.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    running.scheduler.end["retry_after_s"] = 2.25
    response = await post(running, "/v1/completions")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"  # whole seconds: never too early
    assert response.headers["retry-after-ms"] == "2250"
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="Hello")))
    trailers = dict(caught.value.trailing_metadata() or ())
    assert trailers["grpc-retry-pushback-ms"] == "2250"
    (detail,) = Status.FromString(trailers["grpc-status-details-bin"]).details
    info = RetryInfo()
    assert detail.Unpack(info)
    assert info.retry_delay.ToTimedelta().total_seconds() == 2.25


async def test_a_grpc_call_brings_its_standing_along(running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    sampling = types_pb2.SamplingParams(max_tokens=4)

    async def submitted(timeout_s: float | None, *metadata: Any, **options: Any) -> Any:
        request = pb.GenerateRequest(
            prompt=pb.Prompt(text="Hello"),
            options=pb.GenerationOptions(sampling=sampling, **options),
        )
        await stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return running.scheduler.submits[-1]

    submit = await submitted(None)
    assert (submit.priority, submit.tenant, submit.HasField("timeout_s")) == (0, "", False)
    submit = await submitted(30.0, ("x-tenant", "acme"), priority=3)
    assert (submit.priority, submit.tenant) == (3, "acme")
    assert 25 < submit.timeout_s < 31  # gRPC rounds up the time sent
    assert (await submitted(None, ("x-tenant", "acme"), tenant="own")).tenant == "own"
