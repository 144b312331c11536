"""Requests of agents over a session, built turn by turn as each of them was seen to do it.

A session is a story: which calls the model makes, what comes back, and what else happens. A client
tells it in its API: it keeps the conversation in its own form, and builds the next body of it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.agents.model_families import Call

SYSTEM = " ".join(f"Rule {number}: mind the shape of item {number * 7}." for number in range(460))
TOOL_NAMES = ("read_file", "run_command", "search", "edit_file")
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
}
NUM_TURNS = 30
# Turns at which something happens.
PARALLEL, QUESTION = {6, 13, 25}, {4, 9, 14, 23, 28}
CUT, IMAGE, FOUND, LATE, COMPACTED = 7, 10, 11, 16, 19


@dataclass(frozen=True, slots=True)
class Step:
    """The model's words at one turn of the story."""

    number: int
    thought: str
    text: str
    calls: tuple[Call, ...]

    @property
    def is_cut(self) -> bool:
        """True if the answer ends in the middle of its call."""
        return self.number == CUT


def story() -> list[Step]:
    """The steps of a session; the model calls tools, except before the user's next question."""
    steps = []
    for number in range(NUM_TURNS):
        name = TOOL_NAMES[number % len(TOOL_NAMES)]
        calls: tuple[Call, ...] = ((name, {"path": f"src/a{number}.py", "line": number}),)
        if number in PARALLEL:
            calls = (*calls, ("search", {"path": f"b{number}", "line": 1}))
        if number + 1 in QUESTION or number == NUM_TURNS - 1:
            calls = ()
        steps.append(Step(number, f"Hm {number}.", f"Now {number}.", calls))
    return steps


def result_of(call: Call, number: int) -> str:
    """The result of a tool."""
    return f"{number}: {call[0]} saw it."


@dataclass(slots=True)
class Answer:
    """An answer of the gateway, as a client reads it."""

    body: dict[str, Any]
    calls: list[Call]
    ids: list[str]
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_share(self) -> float:
        """The part of the prompt that was in the prefix cache."""
        return float(self.usage["cached"] / self.usage["prompt"])


class Client(ABC):
    """One agent: its conversation in its own form."""

    name: str
    route: str

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []

    @abstractmethod
    def body(self, number: int) -> dict[str, Any]:
        """The body of the request at a turn."""

    @abstractmethod
    def read(self, body: dict[str, Any]) -> Answer:
        """The calls of an answer that came whole."""

    @abstractmethod
    def read_events(self, events: Sequence[dict[str, Any]]) -> Answer:
        """The same of one that was streamed."""

    @abstractmethod
    def go_on(self, step: Step, answer: Answer) -> None:
        """Adds an answer, what the tools returned, and what else happens."""

    def ask(self, words: str) -> None:
        """Adds a question of the user."""
        self.turns.append({"role": "user", "content": words})


class ClaudeCode(Client):
    """Claude Code over /v1/messages."""

    name, route = "claude-code", "/v1/messages"

    def body(self, number: int) -> dict[str, Any]:
        version = f"cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05x};"
        line = f"x-anthropic-billing-header: {version}"
        control = {"cache_control": {"type": "ephemeral"}}
        tools: list[dict[str, Any]] = [
            {"name": name, "description": f"Does {name}.", "input_schema": PARAMETERS}
            for name in TOOL_NAMES
        ]
        tools[-1] |= {"defer_loading": True, "eager_input_streaming": True}
        return {
            "model": "fake",
            "max_tokens": 400,
            "system": [
                {"type": "text", "text": line},
                {"type": "text", "text": "You are an agent.", **control},
                {"type": "text", "text": SYSTEM, **control},
            ],
            "messages": self._marked(),
            "tools": [*tools, {"type": "web_search_20250305", "name": "web_search"}],
            "metadata": {"user_id": json.dumps({"session_id": "s"})},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        }

    def _marked(self) -> list[dict[str, Any]]:
        """The turns with a breakpoint at the last block, another one each time."""
        *others, last = self.turns
        content = last["content"]
        if not isinstance(content, list):
            return self.turns
        marked = content[-1] | {"cache_control": {"type": "ephemeral"}}
        return [*others, last | {"content": [*content[:-1], marked]}]

    def ask(self, words: str) -> None:
        reminder = {
            "type": "text",
            "text": "<system-reminder>\nToday is a day.\n</system-reminder>",
        }
        self.turns.append({"role": "user", "content": [reminder, {"type": "text", "text": words}]})
        if len(self.turns) == 1:
            self.turns.append({"role": "system", "content": "Agents: one for each task."})

    def read(self, body: dict[str, Any]) -> Answer:
        uses = [block for block in body["content"] if block["type"] == "tool_use"]
        usage = body["usage"]
        cached = usage["cache_read_input_tokens"]
        return Answer(
            body,
            [(use["name"], use["input"]) for use in uses],
            [use["id"] for use in uses],
            {"cached": cached, "prompt": cached + usage["input_tokens"]},
        )

    def read_events(self, events: Sequence[dict[str, Any]]) -> Answer:
        message: dict[str, Any] = {}
        for event in events:
            match event["type"]:
                case "message_start":
                    message = event["message"] | {"content": []}
                case "content_block_start":
                    message["content"].append(dict(event["content_block"]) | {"pieces": []})
                case "content_block_delta":
                    (text,) = (v for k, v in event["delta"].items() if k != "type")
                    message["content"][-1]["pieces"].append(text)
                case "content_block_stop":
                    block = message["content"][-1]
                    text = "".join(block.pop("pieces"))
                    if block["type"] == "tool_use":
                        block["input"] = _object(text)
                    else:
                        block[block["type"]] = text
                case "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
        return self.read(message)

    def go_on(self, step: Step, answer: Answer) -> None:
        content = answer.body["content"]
        if step.number == FOUND:
            content = [*content, {"type": "redacted_thinking", "data": "sealed"}]
        self.turns.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": call_id, "content": self._returned(step, call)}
            for call_id, call in zip(answer.ids, answer.calls, strict=True)
        ]
        if step.is_cut:
            results = [one | {"is_error": True, "content": "No JSON."} for one in results]
        blocks: list[dict[str, Any]] = results[::-1]  # as they come back
        if step.number in QUESTION or step.number == LATE:
            blocks.append({"type": "text", "text": "<system-reminder>Mind it.</system-reminder>"})
        if blocks:
            self.turns.append({"role": "user", "content": blocks})
        if step.number == LATE:
            self.turns.append({"role": "system", "content": "The mode is another now."})
        if step.number == COMPACTED:
            summary = {"type": "text", "text": "This session goes on from: all was read."}
            self.turns = [{"role": "user", "content": [summary]}]

    def _returned(self, step: Step, call: Call) -> Any:
        text = result_of(call, step.number)
        if step.number == IMAGE:
            return [{"type": "text", "text": text}, {"type": "image", "source": None}]
        if step.number == FOUND:
            return [{"type": "tool_reference", "tool_name": TOOL_NAMES[-1]}]
        return text


class Responses(Client):
    """A client of /v1/responses that sends the items of answers back."""

    route = "/v1/responses"
    refers = False  # to items by their ids
    fields: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}  # noqa: RUF012

    def body(self, number: int) -> dict[str, Any]:
        tools = [
            {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
            for name in TOOL_NAMES
        ]
        asked = {"model": "fake", "input": [*self.opening(), *self.turns], "tools": tools}
        return asked | {"tool_choice": "auto", "parallel_tool_calls": True} | self.fields

    def opening(self) -> list[dict[str, Any]]:
        """The instructions."""
        return [{"role": "developer", "content": SYSTEM}]

    def read(self, body: dict[str, Any]) -> Answer:
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        usage = body["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Answer(
            body,
            [(call["name"], _object(call["arguments"])) for call in calls],
            [call["call_id"] for call in calls],
            {"cached": cached, "prompt": usage["input_tokens"]},
        )

    def read_events(self, events: Sequence[dict[str, Any]]) -> Answer:
        return self.read(events[-1]["response"])

    def go_on(self, step: Step, answer: Answer) -> None:
        items = answer.body["output"]
        if self.refers:
            items = [{"type": "item_reference", "id": item["id"]} for item in items]
        self.turns += items
        for call_id, call in reversed(list(zip(answer.ids, answer.calls, strict=True))):
            output: Any = result_of(call, step.number)
            if step.number == IMAGE:
                output = [{"type": "input_text", "text": output}, {"type": "input_image"}]
            item = {"type": "function_call_output", "call_id": call_id, "output": output}
            self.turns.append(item)
        if step.number == FOUND:
            searched = {"type": "web_search_call", "id": "ws", "status": "completed"}
            self.turns += [searched, {"type": "compaction", "encrypted_content": "x"}]
        if step.number == LATE:
            self.turns.append({"role": "developer", "content": "The mode is another now."})
        if step.number == COMPACTED:
            self.turns = [{"role": "user", "content": "Summary: all was read."}]


class Codex(Responses):
    """Codex as it comes: hosted tools, several developers in front, namespaces."""

    name = "codex"

    def opening(self) -> list[dict[str, Any]]:
        texts = (SYSTEM, "Skills: none.")
        return [
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "developer",
                "content": [{"type": "input_text", "text": text}],
            }
            for number, text in enumerate(texts)
        ]

    def body(self, number: int) -> dict[str, Any]:
        body = super().body(number)
        agents = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
        body["tools"] += [
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [agents]},
            {"type": "web_search", "external_web_access": False},
        ]
        return body | {
            "reasoning": {"summary": "auto"},
            "prompt_cache_key": "session",
            "client_metadata": {"turn_id": str(number)},
        }


class AiSdk(Responses):
    """The AI SDK's default model: items of earlier answers by their ids."""

    name, refers = "ai-sdk", True
    fields: dict[str, Any] = {}  # noqa: RUF012


class Agents(Responses):
    """OpenAI's agents library: instructions, and items as they came."""

    name = "openai-agents"
    fields: dict[str, Any] = {"instructions": SYSTEM, "truncation": "auto"}  # noqa: RUF012

    def opening(self) -> list[dict[str, Any]]:
        return []


class Chats(Client):
    """A client of /v1/chat/completions."""

    route = "/v1/chat/completions"
    sends_thoughts = False

    def body(self, number: int) -> dict[str, Any]:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
            for name in TOOL_NAMES
        ]
        system = {"role": "system", "content": SYSTEM}
        asked = {"model": "fake", "messages": [system, *self.turns], "tools": tools}
        return asked | {"stream_options": {"include_usage": True}}

    def read(self, body: dict[str, Any]) -> Answer:
        message = body["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        usage = body["usage"]
        return Answer(
            message,
            [(c["function"]["name"], _object(c["function"]["arguments"])) for c in calls],
            [call["id"] for call in calls],
            {
                "cached": usage["prompt_tokens_details"]["cached_tokens"],
                "prompt": usage["prompt_tokens"],
            },
        )

    def read_events(self, events: Sequence[dict[str, Any]]) -> Answer:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        for delta in (choice["delta"] for event in events for choice in event["choices"]):
            message["content"] += delta.get("content") or ""
            if thought := delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            for part in delta.get("tool_calls") or []:
                if part["index"] == len(calls):
                    calls.append(part | {"function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        if calls:
            message["tool_calls"] = calls
        return self.read({"choices": [{"message": message}], "usage": events[-1]["usage"]})

    def go_on(self, step: Step, answer: Answer) -> None:
        dropped = () if self.sends_thoughts else ("reasoning_content", "reasoning")
        message = {name: value for name, value in answer.body.items() if name not in dropped}
        self.turns.append(message)
        for call_id, call in reversed(list(zip(answer.ids, answer.calls, strict=True))):
            content: Any = result_of(call, step.number)
            if step.number == IMAGE:
                content = [{"type": "text", "text": content}, {"type": "image_url"}]
            self.turns.append({"role": "tool", "tool_call_id": call_id, "content": content})
        if step.number == LATE:
            self.turns.append({"role": "system", "content": "The mode is another now."})
        if step.number == COMPACTED:
            self.turns = [{"role": "user", "content": "Summary: all was read."}]


class OpenCode(Chats):
    """opencode: the AI SDK's chats, with thoughts sent back."""

    name, sends_thoughts = "opencode", True


class LangChain(Chats):
    """LangChain's agents: names, and calls with an index."""

    name = "langchain"

    def go_on(self, step: Step, answer: Answer) -> None:
        super().go_on(step, answer)
        for turn in self.turns:
            if turn["role"] == "tool":
                turn.setdefault("name", TOOL_NAMES[0])


CLIENTS: tuple[type[Client], ...] = (ClaudeCode, Codex, AiSdk, Agents, OpenCode, LangChain)


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; those of a call that was cut off as Anthropic's clients tell them."""
    try:
        return dict(json.loads(text or "{}"))
    except ValueError:
        return {"INVALID_JSON": text}
