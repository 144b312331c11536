"""The items of a response, and the events as they grow. Pure."""

import uuid
from collections.abc import Iterable
from typing import Any

from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = dict[str, Any]

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class Items:
    """The items of an answer: reasoning, messages and calls, in order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None  # of the open item; None when none is open

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Adds parts of the answer; returns the events."""
        return [event for part in parts for event in self._add(part)]

    def _add(self, part: Part) -> list[Event]:
        match part:
            case CallStart():
                return [*self.close(COMPLETED), *self._open(_call(part))]
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
        if item["type"] != "function_call":
            events.append(self._event("response.content_part.added", part=dict(item["content"][0])))
        return events

    def _grow(self, text: str) -> Event:
        assert self._pieces is not None
        self._pieces.append(text)
        match self.items[-1]["type"]:
            case "function_call":
                return self._event("response.function_call_arguments.delta", delta=text)
            case "reasoning":
                return self._event("response.reasoning_text.delta", delta=text)
            case _:
                return self._event("response.output_text.delta", delta=text, logprobs=[])

    def close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one; returns the events."""
        if self._pieces is None:
            return []
        item, text = self.items[-1], "".join(self._pieces)
        self._pieces = None
        item["status"] = status
        done: list[Event]
        if item["type"] == "function_call":
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
            if self.items[-1]["type"] != "function_call":
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


def _call(start: CallStart) -> dict[str, Any]:
    item = {"id": _new_id("fc"), "type": "function_call", "status": IN_PROGRESS}
    return item | {"call_id": start.id, "name": start.name, "arguments": ""}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
