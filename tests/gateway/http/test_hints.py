"""Hints that ask for less are accepted; what another server would change its output by is not."""

from typing import Any

import pytest

from gateway.http import fields
from tests.gateway.http_calls import post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

WARNING = "x-pagewire-warning"
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]},
}
CHAT, COMPLETION, RESPONSE, MESSAGES = BASES


@pytest.mark.parametrize(
    ("route", "hint"),
    [
        (CHAT, {"verbosity": "low"}),
        (CHAT, {"verbosity": "high"}),
        (CHAT, {"store": True}),
        (RESPONSE, {"text": {"verbosity": "low"}}),
        (RESPONSE, {"text": {"verbosity": "high", "format": {"type": "text"}}}),
        (RESPONSE, {"truncation": "auto"}),
        (RESPONSE, {"max_tool_calls": 3}),
        (CHAT, {"n": 128}),
        (CHAT, {"stream": True, "n": 40}),
        (COMPLETION, {"n": 100, "best_of": 128}),
    ],
    ids=str,
)
async def test_hints_ask_for_nothing_that_must_fail(
    route: str, hint: dict[str, Any], running: Any
) -> None:
    if "best_of" in hint:
        running.scheduler.output = []
    answered = await running.http.post(route, json=BASES[route] | hint)
    assert answered.status_code == 200, answered.text
    assert WARNING not in answered.headers


async def test_many_choices_are_all_there(running: Any) -> None:
    answer = await post(running, CHAT, BASES[CHAT] | {"n": 128})
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))


ASKING: dict[str, Any] = {
    "lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"},
    "adapter_id": "org/adapter",
    "regex": "[0-9]+",
    "typical_p": 0.5,
    "mirostat": 2,
    "do_sample": False,
    "num_beams": 4,
    "return_hidden_states": True,
    "max_new_tokens": 5,
    "image_data": ["aaaa"],
}


@pytest.mark.parametrize("route", BASES)
@pytest.mark.parametrize("name", ASKING)
async def test_what_another_server_changes_its_output_by_is_refused_by_name(
    route: str, name: str, running: Any
) -> None:
    asked = BASES[route] | {name: ASKING[name]}
    status, param, message = await refusal(running, route, asked)
    assert (status, param) == (400, name)
    assert "not supported" in message


@pytest.mark.parametrize("route", BASES)
async def test_the_same_fields_ask_for_nothing_at_their_neutral_values(
    route: str, running: Any
) -> None:
    values = {name: (None, [], {}, "", *offs) for name, offs in fields.ELSEWHERE.items()}
    for number in range(max(map(len, values.values()))):  # a refusal names its field
        body = {name: offs[number % len(offs)] for name, offs in values.items()}
        answered = await running.http.post(route, json=BASES[route] | body)
        assert answered.status_code == 200, (body, answered.text)
        assert WARNING not in answered.headers


@pytest.mark.parametrize("route", BASES)
async def test_a_misspelt_field_is_told_of(route: str, running: Any) -> None:
    answered = await running.http.post(route, json=BASES[route] | {"temprature": 0})
    assert answered.status_code == 200
    assert "temprature" in answered.headers[WARNING]
