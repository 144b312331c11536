"""litellm: tool loops, streams, typed output, and its classes of errors."""

from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="litellm is not here: make test-clients")
pydantic = pytest.importorskip("pydantic")

USER: Any = {"role": "user", "content": "The weather?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"is_today": {"type": "boolean"}},
                "required": ["is_today"],
                "additionalProperties": False,
            },
        },
    }
]


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_sunny: bool


@pytest.fixture
def common(base_url: str) -> Any:
    return {
        "model": "openai/tiny",
        "api_base": base_url,
        "api_key": "none",
        "max_tokens": 200,
        "temperature": 0,
    }


def test_a_loop_with_tools(common: Any) -> None:
    first = litellm.completion(messages=[USER], tools=TOOLS, tool_choice="required", **common)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    assert results
    last = litellm.completion(messages=[USER, message, *results], tools=TOOLS, **common)
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_stream(common: Any) -> None:
    chunks = list(litellm.completion(messages=[USER], stream=True, **common))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content


def test_typed_output(common: Any) -> None:
    answer = litellm.completion(messages=[USER], response_format=Weather, **common)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_classes_of_errors(common: Any) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=[USER], **common | {"model": "openai/other"})
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **common)


def test_rerank_and_anthropics_api(common: Any, url: str) -> None:
    ranked = litellm.rerank(
        model="cohere/tiny", query="a", documents=["b", "c"], top_n=1, api_base=url, api_key="none"
    )
    assert len(ranked.results) == 1
    answer = litellm.completion(
        messages=[USER], model="anthropic/tiny", api_base=url, api_key="none", max_tokens=8
    )
    assert answer.choices[0].finish_reason == "length"
