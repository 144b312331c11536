"""Frameworks of agents: one run each with a tool, against the model of no language."""

import asyncio

import pytest

# The development environment has langchain-openai, too.
pytest.importorskip("anthropic", reason="not the clients' environment: make test-clients")

CALLED: list[bool] = []


def look(near: bool) -> str:
    """Looks around.

    Args:
        near: whether to look near
    """
    CALLED.append(near)
    return "seen"


def test_langchain_anthropic_goes_on_with_its_calls(url: str) -> None:
    langchain_anthropic = pytest.importorskip("langchain_anthropic")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain_anthropic.ChatAnthropic(
        base_url=url, api_key="none", model="tiny", max_tokens=60, temperature=0, max_retries=0
    )
    question = messages.HumanMessage("Look.")
    forced = model.bind_tools([look], tool_choice="look", parallel_tool_calls=False)
    answer = forced.invoke([question])
    assert answer.tool_calls[0]["name"] == "look"
    results = [messages.ToolMessage("seen", tool_call_id=call["id"]) for call in answer.tool_calls]
    last = model.bind_tools([look]).invoke([question, answer, *results])
    assert last.usage_metadata["output_tokens"]


def test_a_graph_of_langchain_runs_its_tools(base_url: str) -> None:
    agents = pytest.importorskip("langchain.agents")
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model="tiny", max_tokens=40, temperature=0, max_retries=0
    )
    agent = agents.create_agent(model, tools=[look], system_prompt="You look.")
    end = agent.invoke({"messages": [("user", "Look.")]}, {"recursion_limit": 5})
    assert len(end["messages"]) >= 2


def test_agno_answers_whole_and_streamed(base_url: str) -> None:
    agent = pytest.importorskip("agno.agent")
    models = pytest.importorskip("agno.models.openai")
    model = models.OpenAIChat(
        id="tiny", base_url=base_url, api_key="none", max_tokens=40, temperature=0
    )
    runner = agent.Agent(model=model, tools=[look], telemetry=False)
    assert runner.run("Look.").messages
    assert list(runner.run("Look.", stream=True))


def test_smolagents_writes_messages_with_tools(base_url: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIModel(
        model_id="tiny", api_base=base_url, api_key="none", max_tokens=60, temperature=0
    )
    tool = smolagents.tool(look)
    message = smolagents.ChatMessage(role="user", content=[{"type": "text", "text": "Look."}])
    answer = model.generate([message], tools_to_call_from=[tool])
    assert answer.tool_calls or answer.content


def test_haystack_goes_on_with_results(base_url: str) -> None:
    chat = pytest.importorskip("haystack.components.generators.chat")
    dataclasses = pytest.importorskip("haystack.dataclasses")
    tools = pytest.importorskip("haystack.tools")
    secret = pytest.importorskip("haystack.utils").Secret.from_token("none")
    generator = chat.OpenAIChatGenerator(
        api_key=secret,
        api_base_url=base_url,
        model="tiny",
        generation_kwargs={"max_tokens": 60, "temperature": 0},
    )
    tool = tools.create_tool_from_function(look)
    said = [dataclasses.ChatMessage.from_user("Look.")]
    choice = {"type": "function", "function": {"name": "look"}}
    forced = {"tool_choice": choice, "max_tokens": 60}
    # Strict: a model of no language would go on with arguments of its own.
    (answer,) = generator.run(said, tools=[tool], tools_strict=True, generation_kwargs=forced)[
        "replies"
    ]
    call = answer.tool_calls[0]
    result = dataclasses.ChatMessage.from_tool("seen", origin=call)
    assert generator.run([*said, answer, result], tools=[tool])["replies"]


def test_dspy_predicts(base_url: str) -> None:
    dspy = pytest.importorskip("dspy")
    model = dspy.LM(
        "openai/tiny", api_base=base_url, api_key="none", max_tokens=40, temperature=0, cache=False
    )
    assert model("Hello")
    assert asyncio.run(model.acall("Hello"))
