"""Tools with the default model and a chat template for them.

Required calls through the openai package and langchain-openai, and separated reasoning.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.e2e.conftest import ROOT, START_TIMEOUT_S, STOP_TIMEOUT_S, Product
from tests.pace import patience
from tests.ports import free_port
from tests.tiny_model import TOOL_TEMPLATE

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "get_time"}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
QUESTION = "What will the weather be in Paris for the next 3 days?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def product(tiny_product: Product) -> Product:
    return tiny_product


@pytest.fixture(scope="module")
def base_url(
    product: Product, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A second gateway of the same product."""
    folder = tmp_path_factory.mktemp("tools")
    shutil.copy(tiny_model / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    url = f"http://127.0.0.1:{(http_port := free_port())}"
    command = [sys.executable, "-m", "gateway", "--model", str(folder), "--grpc-port", "0"]
    command += ["--scheduler", f"127.0.0.1:{product.scheduler_port}"]
    command += ["--http-port", str(http_port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"{url}/v1"
    finally:
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0


def _is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", timeout=patience(2)).is_success
    return False


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=patience(120)
    ) as client:
        yield client


@pytest.fixture(scope="module")
def name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def check_weather(arguments: str) -> None:
    call = json.loads(arguments)
    assert set(call) == {"city", "days"}
    assert call["city"] in ("Paris", "Rome", "Oslo")
    assert 1 <= call["days"] <= 9


@pytest.mark.parametrize("seed", [1, 2])
def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI, name: str, seed: int) -> None:
    answer = client.chat.completions.create(
        model=name,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        seed=seed,
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    if call.function.name == "get_weather":
        check_weather(call.function.arguments)
    else:
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {})


def test_a_named_call_is_streamed_and_its_result_answered(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    chunks = client.chat.completions.create(
        model=name,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=100,
        stream=True,
    )
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    message = state.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    check_weather(call.function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    turn: Any = message.model_dump(exclude={"parsed"})
    for made in turn["tool_calls"]:
        made["function"].pop("parsed_arguments", None)
        made.pop("index", None)
    answer = client.chat.completions.create(
        model=name, messages=[*MESSAGES, turn, result], tools=TOOLS, max_tokens=16
    )
    assert answer.choices[0].message.content is not None


def test_langchain_calls_a_tool_and_streams_an_answer(base_url: str, name: str) -> None:
    model = ChatOpenAI(model=name, base_url=base_url, api_key="none", max_tokens=100, seed=3)
    bound = model.bind_tools(TOOLS, tool_choice="get_weather")
    asked: Any = AIMessageChunk("")
    for chunk in bound.stream(QUESTION):
        asked = asked + chunk
    (call,) = asked.tool_calls
    check_weather(json.dumps(call["args"]))
    history = [HumanMessage(QUESTION), asked, ToolMessage("Rain.", tool_call_id=call["id"])]
    short = model.bind(max_tokens=16)
    pieces = [piece.text for piece in short.stream(history)]
    assert len(pieces) > 2
    assert "".join(pieces).strip()


def test_a_response_calls_a_tool(client: openai.OpenAI, name: str) -> None:
    answer = client.responses.create(
        model=name,
        input=QUESTION,
        tools=[{"type": "function", "strict": True, **WEATHER}],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=100,
    )
    (item,) = answer.output
    assert item.type == "function_call"
    check_weather(item.arguments)
