"""pydantic-ai: native, tool and plain outputs, tools, streams."""

import asyncio
from typing import Any

import pytest

pydantic_ai = pytest.importorskip(
    "pydantic_ai", reason="pydantic-ai is not here: make test-clients"
)
pydantic = pytest.importorskip("pydantic")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_sunny: bool


SETTINGS: Any = {"max_tokens": 60, "temperature": 0.0}


@pytest.fixture
def model(base_url: str) -> Any:
    provider = providers.OpenAIProvider(base_url=base_url, api_key="none")
    return models.OpenAIChatModel("tiny", provider=provider)


@pytest.mark.parametrize("form", ["NativeOutput", "ToolOutput"])
def test_typed_output(form: str, model: Any) -> None:
    output = getattr(pydantic_ai, form)(Weather)
    agent = pydantic_ai.Agent(model, output_type=output, model_settings=SETTINGS)
    assert isinstance(agent.run_sync("The weather?").output, Weather)


def test_tools_of_a_run_without_a_form(model: Any) -> None:
    called: list[bool] = []

    def get_weather(is_today: bool) -> str:
        """The weather, today or tomorrow."""
        called.append(is_today)
        return "sunny"

    # The model of no language calls only what it must; after the call it must no longer.
    def settings(context: Any) -> Any:
        return SETTINGS | {"extra_body": {} if called else {"tool_choice": "required"}}

    agent = pydantic_ai.Agent(model, tools=[get_weather], model_settings=settings)
    result = agent.run_sync("The weather?")
    assert called
    assert isinstance(result.output, str)
    again = agent.run_sync("And now?", message_history=result.all_messages())
    assert isinstance(again.output, str)


async def _streamed(model: Any) -> str:
    agent = pydantic_ai.Agent(model, model_settings=SETTINGS)
    async with agent.run_stream("Hello") as result:
        return "".join([text async for text in result.stream_text(delta=True)])


def test_a_stream(model: Any) -> None:
    assert asyncio.run(_streamed(model))
