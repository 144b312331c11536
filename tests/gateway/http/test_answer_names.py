"""Every answer has its request's id; HEAD is answered as GET; a proxy's prefix is no obstacle."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from gateway.edge.edge_limits import EdgeLimits
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.http_calls import error_of
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = {"prompt": "Hello", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
POSTS: dict[str, dict[str, Any]] = {
    "/v1/completions": HELLO,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
}
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
ODD_IDS = ("a\tb", "ä", "x" * 257, "x" * 10_000, "\x80")


def names_of(response: Any) -> list[str]:
    return [value for name, value in response.headers.multi_items() if name == "x-request-id"]


@pytest.mark.parametrize("path", POSTS)
async def test_an_answer_has_the_id_that_was_given_or_a_new_one(path: str, running: Any) -> None:
    given = await running.http.post(path, json=POSTS[path], headers={"x-request-id": "mine"})
    assert given.status_code == 200, given.text
    assert names_of(given) == ["mine"]
    first, second = [await running.http.post(path, json=POSTS[path]) for _ in range(2)]
    assert len({*names_of(first), *names_of(second)}) == 2
    if "id" in first.json():
        assert names_of(first) == [first.json()["id"]]
    refused = await running.http.post(path, json={"model": 1}, headers={"x-request-id": "mine"})
    assert refused.status_code == 400 and names_of(refused) == ["mine"]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_has_an_id(path: str, running: Any) -> None:
    response = await running.http.post(path, json=POSTS[path] | {"stream": True})
    assert response.status_code == 200
    (name,) = names_of(response)
    assert name in response.text


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/v1/models", 200), ("/v1/models/x", 404), ("/nothing", 404)],
)
async def test_answers_without_a_body_in_their_request_have_an_id(
    path: str, status: int, running: Any
) -> None:
    response = await running.http.get(path)
    (name,) = names_of(response)
    assert response.status_code == status and name.startswith("req-")


async def test_refusals_of_broken_requests_have_an_id(start: Any) -> None:
    running = await start(edge=EdgeLimits(max_headers=5))
    host, port = running.http_url.removeprefix("http://").split(":")
    for noise in (b"\0\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9 + b"\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        async with asyncio.timeout(patience(10)):
            assert b"\r\nx-request-id: req-" in await reader.read()
        writer.close()


@pytest.mark.parametrize("odd", ODD_IDS)
@pytest.mark.parametrize("path", STREAMS)
async def test_an_id_that_is_not_plain_never_comes_back(path: str, odd: str, running: Any) -> None:
    response = await running.http.post(
        path, json=POSTS[path], headers={"x-request-id": odd.encode("latin-1")}
    )
    assert response.status_code == 200, response.text
    assert odd not in response.json()["id"] and names_of(response)[0].isascii()
    assert running.scheduler.submits[-1].request_id.isascii()
    assert len(running.scheduler.submits[-1].request_id) < 100


@pytest.mark.parametrize("odd", [*ODD_IDS, "a\r\nb: c", "\0", "\x7f", "😀"])
async def test_one_in_a_body_is_replaced_with_a_warning_or_refused(
    odd: str, running: Any, start: Any
) -> None:
    body = HELLO | {"request_id": odd}
    response = await running.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["id"].startswith("cmpl-")
    assert names_of(response) == [response.json()["id"]]
    assert response.headers["x-pagewire-warning"].startswith("request_id: was replaced")


async def test_strict_gateways_and_calls_refuse_one_by_its_name(start: Any) -> None:
    running = await start(strict_requests=True)
    response = await running.http.post("/v1/completions", json=HELLO | {"request_id": "a\0"})
    assert error_of(response, 400)["param"] == "request_id"
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = inference_pb2.GenerationOptions(request_id="a\r\nb")
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text="Hello"), options=options
    )
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stub.Generate(request)
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (told.value.details() or "").startswith("request_id: ")


async def test_a_call_may_name_itself_in_its_metadata(running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="Hello"))
    answer = await stub.Generate(request, metadata=(("x-request-id", "named"),))
    assert answer.request_id == "named"
    answer = await stub.Generate(request, metadata=(("x-request-id", "n" * 300),))
    assert answer.request_id.startswith("gen-")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
async def test_what_a_client_names_is_not_repeated_at_length(path: str, running: Any) -> None:
    long = "m" * 3_000_000
    for more in ({"model": long}, {"request_id": long, "model": "😀" * 100_000}):
        response = await running.http.post(path, json=POSTS[path] | more)
        assert response.status_code == 404 and len(response.content) < 3000
    bodies = [
        {long: 1, "model": 1},
        {"response_format": {"type": long}},
        {"tools": [{"type": "function", "function": {"name": long}}] * 2, **CHAT},
        {"logit_bias": {long: 1}},
        {"chat_template_kwargs": {long: 1}},
        {"previous_response_id": long},
    ]
    for body in bodies:
        response = await running.http.post(path, json=POSTS[path] | body)
        assert len(response.content) < 5000 and len(str(response.headers)) < 5000
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    options = inference_pb2.GenerationOptions(model=long)
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text="Hello"), options=options
    )
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stub.Generate(request)
    assert told.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(told.value.details() or "") < 3000


async def test_head_is_answered_as_get_without_its_body(running: Any) -> None:
    paths = ["/", "/docs", "/openapi.json", "/metrics", "/page/icon.svg", "/v1/models/nothing"]
    described = json.loads((await running.http.get("/openapi.json")).text)["paths"]
    paths += [path for path, methods in described.items() if "get" in methods and "{" not in path]
    changing = {"x-request-id", "date", "content-length"}
    for path in paths:
        whole, head = await running.http.get(path), await running.http.head(path)
        assert head.status_code == whole.status_code and not head.content, path
        assert {*head.headers} == {*whole.headers}, path
        for name in {*whole.headers} - changing:
            assert head.headers[name] == whole.headers[name], path
    assert (await running.http.head("/v1/completions")).status_code == 405
    assert (await running.http.get("/health")).status_code == 200  # the connection goes on


async def test_head_of_a_stream_without_an_end_ends(running: Any) -> None:
    async with asyncio.timeout(patience(10)):
        head = await running.http.head("/v1/live")
    assert head.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("prefix", ["", "/llm/api"])
async def test_a_prefix_may_be_left_or_removed_by_the_proxy(prefix: str, start: Any) -> None:
    running = await start(root_path="/llm/api", api_key="key", edge=EdgeLimits())
    http, own = running.http, {"authorization": "Bearer key"}
    assert (await http.get(f"{prefix}/health")).status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert (await http.get(f"{prefix}{path}")).status_code == 401
        assert (await http.get(f"{prefix}{path}", headers=own)).status_code == 200
    answer = await http.post(f"{prefix}/v1/completions", json=HELLO, headers=own)
    assert answer.status_code == 200
    error = (await http.post(f"{prefix}/v1/messages", json={}, headers=own)).json()
    assert error["type"] == "error"  # in the form of its API
    document = (await http.get(f"{prefix}/openapi.json", headers=own)).json()
    assert document["servers"] == [{"url": "/llm/api"}] and "/v1/completions" in document["paths"]
    assert (await http.get("/llm/apiary/health")).status_code == 401


async def test_values_in_messages_are_written_as_in_json(running: Any) -> None:
    for body, told in (
        ({"return_mm_kwargs": True}, "send false"),
        ({"spaces_between_special_tokens": False}, "send true"),
        ({"vllm_xargs": {"a": 1}}, "send {}"),
    ):
        response = await running.http.post("/v1/chat/completions", json=CHAT | body)
        assert error_of(response, 400)["message"].endswith(told)
