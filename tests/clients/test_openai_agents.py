"""openai-agents: runs with tools, streams and typed output, over both of OpenAI's APIs."""

import asyncio
from typing import Any

import pytest

agents = pytest.importorskip("agents", reason="openai-agents is not here: make test-clients")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_sunny: bool


CALLED: list[bool] = []


def get_weather(is_today: bool) -> str:
    """The weather, today or tomorrow."""
    CALLED.append(is_today)
    return "sunny"


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    agents.set_tracing_disabled(True)
    CALLED.clear()
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return getattr(agents, request.param)(model="tiny", openai_client=client)


def agent(model: Any, **fields: Any) -> Any:
    asked: Any = {"tools": [agents.function_tool(get_weather)]} | fields
    has_tools = bool(asked["tools"])
    settings = agents.ModelSettings(
        tool_choice="required" if has_tools else None,
        parallel_tool_calls=False if has_tools else None,
        max_tokens=120,
        temperature=0,
    )
    return agents.Agent(
        name="a", instructions="Help.", model=model, model_settings=settings, **asked
    )


def test_a_run_calls_its_tool_and_answers(model: Any) -> None:
    asked = agent(model, output_type=Weather)
    result = agents.Runner.run_sync(asked, "The weather?", max_turns=9)
    assert CALLED
    assert isinstance(result.final_output, Weather)


async def _streamed(model: Any) -> tuple[set[str], Any]:
    asked = agent(model, output_type=Weather)
    result = agents.Runner.run_streamed(asked, "The weather?", max_turns=9)
    kinds = {event.type async for event in result.stream_events()}
    return kinds, result.final_output


def test_a_streamed_run_calls_its_tool_and_answers(model: Any) -> None:
    kinds, output = asyncio.run(_streamed(model))
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert CALLED
    assert isinstance(output, Weather)


def test_a_run_has_a_typed_output(model: Any) -> None:
    result = agents.Runner.run_sync(agent(model, tools=[], output_type=Weather), "The weather?")
    assert isinstance(result.final_output, Weather)


def test_a_run_calls_a_custom_tool_with_its_text(base_url: str) -> None:
    """The first call is forced; afterwards the model may answer."""
    agents.set_tracing_disabled(True)
    inputs: list[str] = []

    async def count(_: Any, text: str) -> str:
        inputs.append(text)
        return "counted"

    digits = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{1,4}"}
    tool = agents.CustomTool("count", "Counts.", count, digits)
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
    asked = agent(model, tools=[tool], output_type=Weather)
    result = agents.Runner.run_sync(asked, "How many?", max_turns=9)
    assert inputs and all(text.isdigit() for text in inputs)
    assert isinstance(result.final_output, Weather)
