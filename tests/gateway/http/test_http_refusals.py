"""Refusals of the HTTP API: a 400 with the field's name, and without parts of the prompt."""

import json
from typing import Any

import pytest

from gateway.errors import limits
from gateway.http import fields
from tests.gateway.http_calls import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"prompt": "Hello"}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT}


@pytest.mark.parametrize(
    ("route", "table"),
    [("/v1/chat/completions", fields.CHAT), ("/v1/completions", fields.COMPLETION)],
)
async def test_an_unsupported_field_is_refused_by_name_and_accepted_when_it_means_off(
    route: str, table: dict[str, tuple[Any, ...]], running: Any
) -> None:
    for name, neutral in table.items():
        for value in (None, *neutral):
            response = await running.http.post(route, json=ROUTES[route] | {name: value})
            assert response.status_code == 200, response.text
        response = await running.http.post(route, json=ROUTES[route] | {name: {"x": 3}})
        error = error_of(response, 400)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]


@pytest.mark.parametrize("route", ROUTES)
async def test_harmless_fields_are_accepted(route: str, running: Any) -> None:
    for name in fields.HARMLESS:
        body = ROUTES[route] | {name: {"any": "thing"}}
        assert (await running.http.post(route, json=body)).status_code == 200, name


BAD_BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": "Hello"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": ["x"]}, "messages[0]"),
    ("/v1/chat/completions", CHAT | {"temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", CHAT | {"temperature": "0.5"}, "temperature"),
    ("/v1/chat/completions", CHAT | {"top_p": 5e-324}, "top_p"),
    ("/v1/chat/completions", CHAT | {"repetition_penalty": 1e-40}, "repetition_penalty"),
    ("/v1/chat/completions", CHAT | {"temperature": 3}, "temperature"),
    ("/v1/chat/completions", CHAT | {"seed": -2}, "seed"),
    ("/v1/chat/completions", CHAT | {"seed": 1.5}, "seed"),
    ("/v1/chat/completions", CHAT | {"max_tokens": -2}, "max_tokens"),
    ("/v1/chat/completions", CHAT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/chat/completions", CHAT | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ("/v1/chat/completions", CHAT | {"truncation_side": "middle"}, "truncation_side"),
    ("/v1/completions", {"prompt": ["x"] * 2049}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 2048, "n": 3}, "n"),
    ("/v1/chat/completions", CHAT | {"n": True}, "n"),
    ("/v1/chat/completions", CHAT | {"stop": [""]}, "stop[0]"),
    ("/v1/chat/completions", CHAT | {"stop": ["a", 1]}, "stop[1]"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": 5}, "prompt"),
    ("/v1/completions", {"prompt": ["x", True]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [1, 10**9]}, "prompt"),
    ("/v1/completions", {"prompt": [1, -1]}, "prompt"),
    ("/v1/completions", PROMPT | {"min_tokens": 17}, "min_tokens"),
    ("/v1/completions", PROMPT | {"stop_token_ids": [10**9]}, "stop_token_ids"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", CHAT | PROMPT, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
]


async def test_a_bad_body_is_a_400_that_names_the_field(running: Any) -> None:
    for route, body, field in BAD_BODIES:
        error = error_of(await running.http.post(route, json=body), 400)
        assert error["param"] == field
        assert error["message"].startswith(f"{field}: ")
    assert running.scheduler.submits == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("messages[0].content[1].type", {"type": "image_url", "image_url": {"url": "x"}}),
        ("messages[0].content[1].type", {"type": "input_audio", "input_audio": {}}),
    ],
)
async def test_parts_that_are_no_text_are_refused_by_name(
    place: str, value: dict[str, Any], running: Any
) -> None:
    parts = [{"type": "text", "text": "look:"}, value]
    body = {"messages": [{"role": "user", "content": parts}]}
    error = error_of(await running.http.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == (place, "unsupported_parameter")
    assert value["type"] in error["message"]


async def test_unsupported_fields_of_a_turn_are_refused_by_their_place(running: Any) -> None:
    for name in fields.MESSAGE:
        body = {"messages": [{"role": "user", "content": "x", name: "something"}]}
        error = error_of(await running.http.post("/v1/chat/completions", json=body), 400)
        assert error["param"] == f"messages[0].{name}"


async def test_garbage_is_a_400_and_the_gateway_lives_on(running: Any) -> None:
    headers = {"content-type": "application/json"}
    for content in (
        b"{",
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ):
        response = await running.http.post("/v1/chat/completions", content=content, headers=headers)
        error_of(response, 400)
    assert (await running.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_errors_never_repeat_the_prompt(running: Any) -> None:
    secret = "my secret diary"
    bodies = [
        {"messages": [{"role": "user", "content": {"text": secret}}]},
        {"messages": secret},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1, "x": secret}]}]},
    ]
    for body in bodies:
        response = await running.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert secret not in response.text


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(running: Any) -> None:
    fits, fills = [5] * 255, [5] * 256
    assert (await running.http.post("/v1/completions", json={"prompt": fits})).status_code == 200
    for prompt in (fills, "x" * 100_000):
        response = await running.http.post("/v1/completions", json={"prompt": prompt})
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]


async def test_a_body_over_the_limit_is_a_413_whether_it_declares_its_length_or_not(
    running: Any,
) -> None:
    async def endless() -> Any:
        for _ in range(limits.MAX_BODY_BYTES // (1 << 20) + 2):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    padded = b" " * limits.MAX_BODY_BYTES
    for content in (padded + b" ", endless()):
        response = await running.http.post("/v1/completions", content=content, headers=headers)
        assert error_of(response, 413)["code"] == "request_too_large"
    body = json.dumps(PROMPT).encode()
    at_limit = body + padded[len(body) :]
    response = await running.http.post("/v1/completions", content=at_limit, headers=headers)
    assert response.status_code == 200


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | {"max_token": 1}, "max_token"),
    ("/v1/chat/completions", CHAT | {"stream_options": {"x": 1}}, "stream_options.x"),
    ("/v1/chat/completions", {"messages": [CHAT["messages"][0] | {"mood": 1}]}, "messages[0].mood"),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    ("/v1/completions", PROMPT | {"max_token": 1}, "max_token"),
    ("/v1/embeddings", {"input": "x", "max_token": 1}, "max_token"),
    ("/v1/responses", {"input": "x", "max_token": 1}, "max_token"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
]


@pytest.mark.parametrize(("route", "body", "field"), UNKNOWN, ids=lambda value: str(value)[:40])
async def test_an_unknown_field_is_named_in_a_header_or_refused_where_requests_are_strict(
    route: str, body: dict[str, Any], field: str, running: Any, start: Any
) -> None:
    response = await running.http.post(route, json=body)
    assert response.status_code == 200, response.text
    warning = response.headers["x-pagewire-warning"]
    assert warning.startswith(field.replace("[0]", "[]") + ": ")
    strict = await start(strict_requests=True)
    error = error_of(await strict.http.post(route, json=body), 400)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


async def test_a_stream_warns_too(running: Any) -> None:
    body = CHAT | {"stream": True, "max_token": 1, "chat_template_kwargs": {"mood": 2}}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, second = response.headers["x-pagewire-warning"].split("; ")
    assert first.startswith("max_token: ") and second.startswith("chat_template_kwargs.mood: ")


async def test_a_warning_is_short_and_one_header_whatever_the_fields_are_called(
    running: Any,
) -> None:
    names = [f"é\r\nx-evil: {index} " + "x" * 9000 for index in range(100)]
    body = CHAT | dict.fromkeys(names, 1)
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 and "x-evil" not in response.headers
    assert len(response.headers["x-pagewire-warning"]) < 4096
    assert response.headers["x-pagewire-warning"].isascii()


async def test_a_refusal_can_name_a_field_that_is_no_unicode(start: Any) -> None:
    running = await start(strict_requests=True)
    body = CHAT | {"chat_template_kwargs": {"\ud800": 1}}
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    for route in ("/v1/chat/completions", "/tokenize"):
        response = await running.http.post(route, content=content, headers=headers)
        assert error_of(response, 400)["param"] == r"chat_template_kwargs.\ud800"


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', b"[" * 30_000])
async def test_a_body_that_cannot_be_decoded_is_refused_by_name(body: bytes, running: Any) -> None:
    headers = {"content-type": "application/json"}
    response = await running.http.post("/v1/completions", content=body, headers=headers)
    assert error_of(response, 400)["param"] == "body"
