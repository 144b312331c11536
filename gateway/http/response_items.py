"""The items of a response, and the events as they grow. Pure."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from gateway.http.response_tools.bodies import CalledTool
from gateway.http.response_tools.input_text import InputText

Event = dict[str, Any]
CUSTOM = "custom_tool_call"
CALLS = ("function_call", CUSTOM)

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class Items:
    """The items of an answer: reasoning, messages and calls, in order."""

    def __init__(self, tools: Mapping[str, CalledTool]) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools  # by the name that the model calls
        self._pieces: list[str] | None = None  # of the open item; None when none is open
        self._input = InputText()  # of the open item, if it is a call of a custom tool

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Adds parts of the answer; returns the events."""
        return [event for part in parts for event in self._add(part)]

    def _add(self, part: Part) -> list[Event]:
        match part:
            case CallStart():
                called = self._tools.get(part.name, CalledTool(part.name))
                ended = self.close(COMPLETED)
                self._input = InputText()
                return [*ended, *self._open(_call(part, called))]
            case CallArguments() if self.items[-1]["type"] == CUSTOM:
                new = self._input.push(part.text)
                return [self._grow(new)] if new else []
            case CallArguments():
                return [self._grow(part.text)]
            case Reasoning() | Content():
                kind = "reasoning" if isinstance(part, Reasoning) else "message"
                opening: list[Event] = []
                if self._pieces is None or self.items[-1]["type"] != kind:
                    item = _message() if kind == "message" else _reasoning()
                    opening = [*self.close(COMPLETED), *self._open(item)]
                return [*opening, self._grow(part.text)]

    def _open(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(item)
        self._pieces = []
        # A copy, since the item changes later.
        events = [self._event("response.output_item.added", item=_empty(item), is_item=True)]
        if item["type"] not in CALLS:
            events.append(self._event("response.content_part.added", part=dict(item["content"][0])))
        return events

    def _grow(self, text: str) -> Event:
        assert self._pieces is not None
        self._pieces.append(text)
        match self.items[-1]["type"]:
            case "function_call":
                return self._event("response.function_call_arguments.delta", delta=text)
            case "custom_tool_call":
                return self._event("response.custom_tool_call_input.delta", delta=text)
            case "reasoning":
                return self._event("response.reasoning_text.delta", delta=text)
            case _:
                return self._event("response.output_text.delta", delta=text, logprobs=[])

    def close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one; returns the events."""
        if self._pieces is None:
            return []
        item = self.items[-1]
        rest = self._input.end() if item["type"] == CUSTOM else ""
        done = [self._grow(rest)] if rest else []
        text = "".join(self._pieces)
        self._pieces = None
        item["status"] = status
        if item["type"] == CUSTOM:
            item["input"] = text
            done.append(self._event("response.custom_tool_call_input.done", input=text))
        elif item["type"] == "function_call":
            item["arguments"] = text
            name = item["name"]
            done = [self._event("response.function_call_arguments.done", arguments=text, name=name)]
        else:
            (part,) = item["content"]
            part["text"] = text
            is_message = item["type"] == "message"
            kind = "output_text" if is_message else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if is_message else {}
            done = [
                self._event(f"response.{kind}.done", text=text, **more),
                self._event("response.content_part.done", part=part),
            ]
        return [*done, self._event("response.output_item.done", item=item, is_item=True)]

    def _event(self, kind: str, *, is_item: bool = False, **more: Any) -> Event:
        event: Event = {"type": kind, "output_index": len(self.items) - 1}
        if not is_item:
            event["item_id"] = self.items[-1]["id"]
            if self.items[-1]["type"] not in CALLS:
                event["content_index"] = 0
        return event | more


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """The item without its content."""
    return item | {"content": []} if "content" in item else dict(item)


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
    return item | {"status": IN_PROGRESS, "content": [part]}


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
    return item | {"status": IN_PROGRESS, "content": [part]}


def _call(start: CallStart, called: CalledTool) -> dict[str, Any]:
    kind, prefix = (CUSTOM, "ctc") if called.is_custom else ("function_call", "fc")
    item = {"id": _new_id(prefix), "type": kind, "status": IN_PROGRESS}
    item |= {"call_id": start.id, "name": called.name}
    if called.namespace is not None:
        item["namespace"] = called.namespace
    return item | {"input" if called.is_custom else "arguments": ""}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
