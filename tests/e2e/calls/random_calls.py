"""Requests for calls under random schemas, and what an answer to them may be."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai

from tests.pace import patience
from tests.schemas import make_schema

RUNS_ALL = bool(os.environ.get("PAGEWIRE_ALL_SCHEMAS"))
NUM_ALL = 200
# A limit of pytest for one test, in place of that of pyproject.toml.
TIMEOUT_S = patience(1800 if RUNS_ALL else 150)
FORM = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["answer"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request."""

    content: str
    calls: tuple[tuple[str, str], ...]
    reason: str | None


def tools_of(seed: int) -> list[dict[str, Any]]:
    """A strict tool with a random schema."""
    schema = make_schema(seed)
    wrapped = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    closed: dict[str, Any] = wrapped | {"additionalProperties": False}
    if "$defs" in schema:
        closed["$defs"] = schema.pop("$defs")
    function = {"name": "lookup", "strict": True, "parameters": closed}
    return [{"type": "function", "function": function}]


def asking(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Call the tool lookup for {number}."}


def body_of(seed: int, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The body that both models are asked."""
    return {
        "messages": [asking(seed)],
        "tools": tools,
        "parallel_tool_calls": False,
        "seed": seed,
        "temperature": 1.0,
    }


async def ask(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Answer:
    """The whole answer, which is the streamed one."""
    whole = (await client.chat.completions.create(**body)).choices[0]
    calls = tuple(
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()
    )
    answer = Answer(whole.message.content or "", calls, whole.finish_reason)
    content, names, arguments, reason = "", list[str](), list[str](), None
    async for chunk in await client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
    assert Answer(content, tuple(zip(names, arguments, strict=True)), reason) == answer
    return answer


def check(answer: Answer, tools: list[dict[str, Any]], has_form: bool) -> str:
    """The kind of an answer. Raises AssertionError for a third kind."""
    schema = tools[0]["function"]["parameters"]
    is_cut = answer.reason == "length"
    for index, (name, arguments) in enumerate(answer.calls):
        assert name == "lookup"
        if not is_cut or index < len(answer.calls) - 1:
            jsonschema.validate(json.loads(arguments), schema)
    if is_cut:
        return "cut off"
    if has_form and not answer.calls:
        jsonschema.validate(json.loads(answer.content), FORM)
        return "form"
    assert not has_form or not answer.content, answer
    assert "<tool_call>" not in answer.content
    return "calls" if answer.calls else "text"


def ask_all(url: str, body_of_seed: Callable[[int], dict[str, Any]], count: int) -> Counter[str]:
    """Asks for so many schemas, a few at a time; how many answers were of which kind."""
    kinds = Counter[str]()

    async def every() -> None:
        turns = asyncio.Semaphore(8)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="x", timeout=patience(600)
        ) as client:
            model = (await client.models.list()).data[0].id

            async def one(seed: int) -> None:
                body = body_of_seed(seed)
                async with turns:
                    answer = await ask(client, body | {"model": model})
                kinds[check(answer, body["tools"], "response_format" in body)] += 1

            async with asyncio.TaskGroup() as group:
                for seed in range(count):
                    group.create_task(one(seed))

    asyncio.run(every())
    assert kinds.total() == count
    return kinds
