"""langchain-openai: tool loops, streams, typed output, and a context that is too long."""

from typing import Any

import pytest

# The development environment has langchain-openai, too, and tests of its own for it.
pytest.importorskip("anthropic", reason="not the clients' environment: make test-clients")
langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
errors = pytest.importorskip("langchain_core.exceptions")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_sunny: bool


class get_weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather, today or tomorrow."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_today: bool


ONE_CALL: Any = {"parallel_tool_calls": False}  # a model of no language would go on with calls


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model="tiny",
        max_tokens=200,
        temperature=0,
        max_retries=0,
        use_responses_api=request.param,
    )


@pytest.mark.parametrize("strict", [None, True])
def test_a_loop_with_tools(strict: bool | None, model: Any) -> None:
    forced = model.bind_tools([get_weather], tool_choice="any", strict=strict, **ONE_CALL)
    question = messages.HumanMessage("The weather?")
    answer = forced.invoke([question])
    assert answer.tool_calls[0]["name"] == "get_weather"
    results = [messages.ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    free = model.bind_tools([get_weather], strict=strict)
    last = free.invoke([question, answer, *results])
    assert last.content or last.tool_calls


def test_a_stream(model: Any) -> None:
    chunks = list(model.stream("Hello"))
    assert len(chunks) > 1


def test_typed_output(model: Any) -> None:
    for method in ("json_schema", "function_calling"):
        typed = model.with_structured_output(Weather, method=method)
        assert isinstance(typed.invoke("The weather?"), Weather)


def test_a_context_that_is_too_long_is_recognized(model: Any) -> None:
    with pytest.raises(errors.ContextOverflowError):
        model.invoke("word " * 9000)
