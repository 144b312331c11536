"""The OpenAI-compatible API over a real port, with a scripted scheduler."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from gateway.http.events import ChunkWriter
from gateway.http.responses import Answer
from pagewire.v1 import types_pb2
from tests.gateway.http_calls import error_of
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"prompt": "Hello"}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT}


async def events(running: Any, route: str, body: dict[str, Any]) -> list[Any]:
    """The parsed events of a stream; the last is the string [DONE]."""
    found: list[Any] = []
    async with running.http.stream("POST", route, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def test_a_chat_is_answered(running: Any, encode: Callable[[str], list[int]]) -> None:
    response = await running.http.post("/v1/chat/completions", json=CHAT)
    answer = response.json()
    assert response.status_code == 200
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello world"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert running.scheduler.prompt_of(0) == encode(rendered)
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(encode("Hello world"))
    assert usage["prompt_tokens"] == len(encode(rendered))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_content_may_be_a_list_of_text_parts(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": parts, "name": None, "tool_calls": []}]}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    rendered = "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert running.scheduler.prompt_of(0) == encode(rendered)


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(running: Any) -> None:
    *chunks, done = await events(running, "/v1/chat/completions", CHAT)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello world"
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_carries_usage_when_asked(route: str, running: Any) -> None:
    body = ROUTES[route] | {"stream_options": {"include_usage": True}}
    *chunks, last, done = await events(running, route, body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_characters_and_quotes_survive_the_stream(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    text = 'say "中文" \\ 😀👩‍👩‍👧\n\té \u2028 end'
    running.scheduler.output = encode(text)
    *chunks, _ = await events(running, "/v1/completions", PROMPT)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


async def test_completions_take_text_and_ids_and_lists_of_them(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    ids = encode("Hello")
    prompts = ["Hello", ids, ["Hello", "world"], [ids, ids[:1]], ["Hello", ids]]
    for prompt, expected in zip(
        prompts,
        [[ids], [ids], [ids, encode("world")], [ids, ids[:1]], [ids, ids]],
        strict=True,
    ):
        running.scheduler.submits.clear()
        response = await running.http.post("/v1/completions", json={"prompt": prompt})
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(expected)))
        assert {choice["text"] for choice in choices} == {"Hello world"}
        submitted = [running.scheduler.prompt_of(i) for i in range(len(expected))]
        assert sorted(submitted) == sorted(expected)
        assert response.json()["usage"]["completion_tokens"] == len(expected) * len(
            encode("Hello world")
        )


async def test_several_prompts_stream_into_one_answer(running: Any) -> None:
    body = {"prompt": ["a", "b", "c"], "stream_options": {"include_usage": True}}
    *chunks, last, done = await events(running, "/v1/completions", body)
    texts = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert set(texts.values()) == {"Hello world"}
    assert sorted(ends) == [0, 1, 2]
    assert last["usage"]["completion_tokens"] == 3 * len(running.scheduler.output)
    assert done == "[DONE]"


async def test_completions_default_to_sixteen_tokens_and_chats_to_the_models_limit(
    running: Any,
) -> None:
    await running.http.post("/v1/completions", json=PROMPT)
    await running.http.post("/v1/chat/completions", json=CHAT)
    await running.http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 7})
    first, second, third = (submit.sampling for submit in running.scheduler.submits)
    assert first.max_tokens == 16
    assert not second.HasField("max_tokens")
    assert third.max_tokens == 7


async def test_sampling_reaches_the_scheduler_and_absence_stays_absence(running: Any) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 2**64 - 1,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
    }
    await running.http.post("/v1/completions", json=PROMPT | sampling)
    await running.http.post("/v1/chat/completions", json=CHAT)
    full, empty = (submit.sampling for submit in running.scheduler.submits)
    assert full == types_pb2.SamplingParams(**sampling)
    assert empty == types_pb2.SamplingParams()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_aborts_the_request(
    stream: bool, running: Any, encode: Callable[[str], list[int]], eventually: Any
) -> None:
    scheduler = running.scheduler
    scheduler.output = encode("The capital of France is Paris. More and more and more.")
    scheduler.hangs_after = len(scheduler.output)
    body = PROMPT | {"stop": " is P", "max_tokens": 99}
    if stream:
        *chunks, _ = await events(running, "/v1/completions", body)
        choices = [chunk["choices"][0] for chunk in chunks]
        text, end = "".join(choice["text"] for choice in choices), choices[-1]
    else:
        response = await running.http.post("/v1/completions", json=body)
        end = response.json()["choices"][0]
        text = end["text"]
        assert response.json()["usage"]["completion_tokens"] < len(scheduler.output)
    assert text == "The capital of France"
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", " is P")
    await eventually(lambda: scheduler.aborted == [scheduler.submits[0].handle], "an abort")


async def test_the_stop_string_is_kept_and_specials_are_shown_when_wanted(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode("<|im_start|>Hello END tail")
    body = PROMPT | {"stop": ["END"], "include_stop_str_in_output": True}
    response = await running.http.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == "Hello END"
    body["skip_special_tokens"] = False
    response = await running.http.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == "<|im_start|>Hello END"


@pytest.mark.parametrize(
    ("end", "reason", "stop_reason"),
    [
        ({"reason": types_pb2.FINISH_REASON_LENGTH}, "length", None),
        ({"reason": types_pb2.FINISH_REASON_STOP, "stop_token_id": 7}, "stop", 7),
        ({"reason": types_pb2.FINISH_REASON_STOP, "stop_token_id": 0}, "stop", 0),
        ({"reason": types_pb2.FINISH_REASON_ABORT}, "abort", None),
    ],
)
async def test_the_schedulers_reason_is_passed_on(
    end: dict[str, Any], reason: str, stop_reason: int | None, running: Any
) -> None:
    running.scheduler.end = end
    choice = (await running.http.post("/v1/completions", json=PROMPT)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
async def test_the_schedulers_refusal_decides_the_status_streamed_or_not(
    code: grpc.StatusCode, status: int, stream: bool, running: Any
) -> None:
    running.scheduler.refuse(code, "because of this")
    body = CHAT | {"stream": stream}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert error_of(response, status)["message"] == "because of this"
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_failure_after_the_first_token_is_an_event_of_the_stream(running: Any) -> None:
    output = running.scheduler.output
    running.scheduler.refuse(grpc.StatusCode.INTERNAL, "logits were not finite")
    running.scheduler.output = output
    *chunks, error, done = await events(running, "/v1/chat/completions", CHAT)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert error["error"]["message"] == "logits were not finite"
    assert done == "[DONE]"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
async def test_a_bug_after_the_first_token_is_an_event_and_not_a_cut(
    route: str, running: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writers = {"/v1/chat/completions": (ChunkWriter, "chunk"), "/v1/responses": (Answer, "add")}
    writer, method = writers[route]
    write, calls = getattr(writer, method), []

    def writes_once(*args: Any) -> bytes:
        calls.append(args)
        if len(calls) > 1:
            raise ValueError("a bug")
        return write(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(writer, method, writes_once)
    body = CHAT if "chat" in route else {"input": "Hello"}
    async with running.http.stream("POST", route, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        text = (await response.aread()).decode()
    assert "internal error; the gateway's log says more" in text
    assert "a request failed unexpectedly" in caplog.text and "ValueError: a bug" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_client_that_leaves_aborts_its_request(
    stream: bool, tokens: int, running: Any, eventually: Any
) -> None:
    scheduler = running.scheduler
    scheduler.hangs_after = tokens
    body = CHAT | {"stream": stream}
    leaving = asyncio.create_task(running.http.post("/v1/chat/completions", json=body))
    await eventually(lambda: scheduler.submits, "a submit")
    await asyncio.sleep(0.05)
    (submit,) = scheduler.submits
    assert submit.handle not in scheduler.aborted  # which may still get one of the test before
    leaving.cancel()
    await eventually(lambda: submit.handle in scheduler.aborted, "an abort")


async def test_unknown_models_and_routes_and_methods_are_named(running: Any) -> None:
    http = running.http
    response = await http.post("/v1/completions", json=PROMPT | {"model": "other"})
    assert "'other'" in error_of(response, 404)["message"]
    assert error_of(await http.get("/v1/models/other"), 404)["param"] == "model"
    assert "/v1/nothing" in error_of(await http.get("/v1/nothing"), 404)["message"]
    assert "GET" in error_of(await http.get("/v1/completions"), 405)["message"]


async def test_the_served_model_is_listed(running: Any) -> None:
    models = (await running.http.get("/v1/models")).json()
    (model,) = models["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 256)
    assert (await running.http.get("/v1/models/tiny")).json() == model


async def test_the_gateway_can_give_the_model_its_own_name(start: Callable[..., Any]) -> None:
    running = await start(served_model_name="org/mine")
    assert (await running.http.get("/v1/models/org/mine")).json()["id"] == "org/mine"
    response = await running.http.post("/v1/completions", json=PROMPT | {"model": "org/mine"})
    assert response.json()["model"] == "org/mine"
    error_of(await running.http.post("/v1/completions", json=PROMPT | {"model": "tiny"}), 404)


async def test_texts_become_ids_and_ids_texts(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    text = "Hello 😀"
    tokens = (await running.http.post("/tokenize", json={"prompt": text})).json()
    assert tokens == {
        "tokens": encode(text),
        "count": len(encode(text)),
        "max_model_len": 256,
    }
    chat = (await running.http.post("/tokenize", json=CHAT)).json()
    assert chat["tokens"][0] == encode("<|im_start|>")[0]
    response = await running.http.post("/detokenize", json={"tokens": chat["tokens"]})
    assert response.json()["prompt"].startswith("<|im_start|>user")


async def test_the_key_opens_everything_and_probes_need_none(start: Callable[..., Any]) -> None:
    running = await start(api_key="s3cret")
    http = running.http
    for path in ("/health", "/ready"):
        assert (await http.get(path)).status_code == 200
    wrong = [
        None,
        "s3cret",
        "Bearer s3cre",
        "Bearer s3cret2",
        "Bearer",
        "Bearer wrong",
        "Basic s3cret",
        "Bearer \xff",
    ]
    for value in wrong:
        headers = {} if value is None else {"authorization": value.encode()}
        for request in (http.get("/v1/models", headers=headers), http.get("/x", headers=headers)):
            response = await request
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    right = {"authorization": b"Bearer s3cret"}
    assert (await http.get("/v1/models", headers=right)).status_code == 200


async def test_alive_is_not_ready(start: Callable[..., Any], scheduler_server: Any) -> None:
    scheduler, _ = scheduler_server
    scheduler.is_ready = False
    running = await start(wait=False)
    assert (await running.http.get("/health")).status_code == 200
    response = await until_told(running, "no worker is attached")
    error_of(response, 503)


async def test_before_the_first_worker_clients_are_told_to_wait_and_no_address(
    start: Callable[..., Any], scheduler_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, _ = scheduler_server
    scheduler.is_ready, scheduler.model = False, None
    scheduler.reason = "UNAVAILABLE: failed to connect to all addresses; ipv4:10.9.8.7:50053"
    running = await start(wait=False)
    with caplog.at_level(logging.INFO):
        await until_told(running, "no worker has attached yet")
    assert "10.9.8.7" in caplog.text
    for response in (
        await running.http.get("/ready"),
        await running.http.post("/v1/completions", json=PROMPT),
    ):
        assert error_of(response, 503)["message"] == "no worker has attached yet"
        assert response.headers["retry-after"] == "1"


async def test_a_scheduler_that_is_away_is_not_told_by_its_address(
    start: Callable[..., Any],
) -> None:
    running = await start(wait=False, scheduler="127.0.0.1:9")
    response = await until_told(running, "the scheduler does not answer")
    assert error_of(response, 503)["message"] == "the scheduler does not answer"
    assert response.headers["retry-after"] == "1"


async def until_told(running: Any, reason: str) -> httpx.Response:
    async with asyncio.timeout(patience(5)):
        while reason not in (response := await running.http.get("/ready")).text:
            await asyncio.sleep(0.02)
    return response
