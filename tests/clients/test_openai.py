"""The openai package: streams, tool loops, typed output, stored responses, embeddings."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.table import fields_of

openai = pytest.importorskip("openai")
# The development environment has this package, too, and tests of its own for it.
pytest.importorskip("anthropic", reason="not the clients' environment: make test-clients")
pydantic = pytest.importorskip("pydantic")
types = pytest.importorskip("openai.types")
chat_types = pytest.importorskip("openai.types.chat")
response_types = pytest.importorskip("openai.types.responses")

USER: Any = {"role": "user", "content": "The weather in Paris?"}


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_sunny: bool


class GetWeather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather in a city."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    days: bool


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_strict_tool_loop_with_a_form(client: Any) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    more: Any = {"model": "tiny", "tools": tools, "max_tokens": 200, "temperature": 0}
    more["parallel_tool_calls"] = False  # a model of no language would go on with calls
    first = client.chat.completions.parse(messages=[USER], tool_choice="required", **more)
    message = first.choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
    call_id = message.tool_calls[0].id
    turns = [USER, message, {"role": "tool", "tool_call_id": call_id, "content": "Sunny"}]
    last = client.chat.completions.parse(messages=turns, response_format=Weather, **more)
    assert last.choices[0].message.parsed or last.choices[0].message.tool_calls


def test_a_stream_of_typed_output(client: Any) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[USER], response_format=Weather, max_tokens=60
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)


def test_responses_continue_each_other(client: Any) -> None:
    first = client.responses.create(model="tiny", input="Hello", max_output_tokens=8)
    more: Any = {"previous_response_id": first.id, "text_format": Weather}
    with client.responses.stream(model="tiny", input="Go on", **more) as stream:
        for _ in stream:
            pass
        second = stream.get_final_response()
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_typed_responses(client: Any) -> None:
    parsed = client.responses.parse(model="tiny", input="Hello", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)


def test_custom_tools_and_namespaces(client: Any) -> None:
    """A call of each is forced, streamed and whole, and comes back with its result."""
    digits = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{1,4}"}
    count: Any = {"type": "custom", "name": "count", "format": digits}
    space: Any = {"type": "namespace", "name": "crm", "description": "Customers."}
    space["tools"] = [count]
    for tool, choice in ((count, {"type": "custom", "name": "count"}), (space, "required")):
        more: Any = {"model": "tiny", "tools": [tool], "tool_choice": choice}
        more["parallel_tool_calls"] = False
        whole = client.responses.create(input="How many?", temperature=0, **more)
        with client.responses.stream(input="How many?", temperature=0, **more) as stream:
            pieces = [event.delta for event in stream if event.type.endswith("_input.delta")]
            last = stream.get_final_response()
        (call,) = whole.output
        assert (call.type, call.name) == ("custom_tool_call", "count")
        assert call.namespace == ("crm" if tool is space else None)
        assert call.input.isdigit() and call.input == last.output[0].input == "".join(pieces)
        result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3"}
        turns: Any = [{"role": "user", "content": "How many?"}, call, result]
        answer = client.responses.create(
            model="tiny", input=turns, tools=[tool], max_output_tokens=8
        )
        assert answer.usage.output_tokens


def test_log_probabilities_of_named_tokens(client: Any) -> None:
    chosen = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        logprobs=True,
        max_tokens=3,
        extra_body={"logprob_token_ids": [9, 7]},
    )
    content = chosen.choices[0].logprobs.content
    assert all(token.top_logprobs[0].token == token.token for token in content)
    names = {tuple(top.token for top in token.top_logprobs[1:]) for token in content}
    assert len(names) == 1 and len(*names) == 2  # the same tokens at each position


def test_embeddings(client: Any) -> None:
    answer = client.embeddings.create(model="tiny", input=["a", "b"])
    assert len(answer.data) == 2


@pytest.mark.parametrize(
    ("section", "theirs"),
    [
        ("`/v1/chat/completions`", chat_types.completion_create_params.CompletionCreateParamsBase),
        ("`/v1/completions`", types.completion_create_params.CompletionCreateParamsBase),
        ("`/v1/responses`", response_types.response_create_params.ResponseCreateParamsBase),
        ("`/v1/embeddings`", types.embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_the_table_has_every_field_of_the_newest_package(section: str, theirs: Any) -> None:
    both = fields_of("Both routes") if "completions" in section else set()
    assert set(theirs.__annotations__) <= fields_of(section) | both
