"""The anthropic package: streams, a tool loop, typed output, counted tokens and typed errors."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.table import fields_of

anthropic = pytest.importorskip("anthropic", reason="anthropic is not here: make test-clients")
pydantic = pytest.importorskip("pydantic")
params = pytest.importorskip("anthropic.types.message_create_params")
count_params = pytest.importorskip("anthropic.types.message_count_tokens_params")

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
USER: Any = {"role": "user", "content": "The weather in Paris?"}
IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, **fields: Any) -> Any:
    return client.messages.create(
        **{"model": "tiny", "max_tokens": 24, "messages": [USER]} | fields
    )


def test_an_answer_and_its_stream_are_the_same(client: Any) -> None:
    fields: Any = {"extra_body": {"temperature": 0.0}, "system": "Be brief."}
    whole = ask(client, **fields)
    with client.messages.stream(model="tiny", max_tokens=24, messages=[USER], **fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 24
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model="tiny", messages=[USER], system="Be brief.")
    assert counted.input_tokens == total


def test_a_loop_with_tools(client: Any) -> None:
    messages = [USER]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    for is_last in (False, False, True):
        more: Any = {} if is_last else {"tool_choice": choice}
        answer = ask(client, messages=messages, tools=[TOOL], max_tokens=120, **more)
        messages.append({"role": "assistant", "content": answer.content})
        if is_last:
            assert answer.stop_reason in ("max_tokens", "end_turn")
            break
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert (call.type, call.name) == ("tool_use", "get_weather")
        assert call.input["city"] in ("Paris", "Oslo")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
        messages.append({"role": "user", "content": [result]})


def test_a_streamed_call_has_its_input(client: Any) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model="tiny", max_tokens=40, messages=[USER], tools=[TOOL], tool_choice=choice
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds
    assert final.content[0].input["city"] in ("Paris", "Oslo")


def test_typed_output(client: Any) -> None:
    class Answer(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        model_config = pydantic.ConfigDict(extra="forbid")
        is_sunny: bool

    answer = client.messages.parse(
        model="tiny", max_tokens=40, messages=[USER], output_format=Answer
    )
    assert isinstance(answer.parsed_output, Answer)


def test_errors_are_typed(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        ask(client, model="other")
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        ask(client, messages=[{"role": "user", "content": [IMAGE]}])
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is"):
        ask(client, messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.") as caught:
        ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="tiny", max_tokens=0, messages=[USER], stream=True)


@pytest.mark.parametrize(
    "theirs",
    [
        getattr(params, "MessageCreateParamsBase", None),
        getattr(count_params, "MessageCountTokensParams", None),
    ],
)
def test_the_table_has_every_field(theirs: Any) -> None:
    assert set(theirs.__annotations__) <= fields_of("`/v1/messages`")
