"""The answer of the Messages API as it grows, and its events. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.chat.conversation import object_of
from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from gateway.edge.error_answers import anthropic_body
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.events import encode_json
from gateway.request.generation import Finish, FinishReason, Usage

Event = dict[str, Any]
# By the type of a block: the field that grows, and the type of its deltas.
_GROWING = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


class MessageAnswer:
    """One answer: blocks of text, thinking and calls, in order."""

    def __init__(
        self,
        message_id: str,
        model: str,
        max_tokens: int | None,
        applied_edits: list[Event] | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        # None: the request asked for no edits of its conversation.
        self._edits: Event = (
            {}
            if applied_edits is None
            else {"context_management": {"applied_edits": applied_edits}}
        )
        self._content: list[Event] = []
        self._pieces: list[str] | None = None  # of the open block; None when none is open
        self.body: Event = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(Usage(0, 0)),
            **self._edits,
        }

    def begin(self, usage: Usage | None) -> list[Event]:
        """The events before the first text, with what the prompt cost."""
        start = self.body | {"content": [], "usage": usage_body(usage or Usage(0, 0))}
        return [{"type": "message_start", "message": start}, {"type": "ping"}]

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Adds parts of the answer; returns the events."""
        return [event for part in parts for event in self._add(part)]

    def _add(self, part: Part) -> list[Event]:
        match part:
            case CallStart():
                call = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                return [*self._close(), self._open(call)]
            case CallArguments():
                return [self._grow(part.text)]
            case Reasoning():
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return [*self._open_unless_open(block), self._grow(part.text)]
            case Content():
                block = {"type": "text", "text": ""}
                return [*self._open_unless_open(block), self._grow(part.text)]

    def _open_unless_open(self, block: Event) -> list[Event]:
        if self._pieces is not None and self._content[-1]["type"] == block["type"]:
            return []
        return [*self._close(), self._open(block)]

    def _open(self, block: Event) -> Event:
        self._content.append(block)
        self._pieces = []
        # A copy, since the block changes later.
        return self._event("content_block_start", content_block=dict(block))

    def _grow(self, text: str) -> Event:
        assert self._pieces is not None
        self._pieces.append(text)
        name, kind = _GROWING[self._content[-1]["type"]]
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _close(self) -> list[Event]:
        if self._pieces is None:
            return []
        block, text = self._content[-1], "".join(self._pieces)
        self._pieces = None
        if block["type"] == "tool_use":
            block["input"] = object_of(text)
        else:
            block[block["type"]] = text
        return [self._event("content_block_stop")]

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "index": len(self._content) - 1, **more}

    def end(self, finish: Finish) -> list[Event]:
        """The events of the end; afterwards the body is the whole answer.

        Raises RequestError for an answer that was aborted, for which the API has no reason.
        """
        if finish.reason is FinishReason.ABORT:
            raise RequestError(ErrorKind.CANCELLED, "the request was aborted")
        events = self._close()
        end = {"stop_reason": self._stop_reason(finish), "stop_sequence": finish.stop_string}
        usage = usage_body(finish.usage)
        self.body |= {**end, "usage": usage}
        return [
            *events,
            {"type": "message_delta", "delta": end, "usage": usage, **self._edits},
            {"type": "message_stop"},
        ]

    def _stop_reason(self, finish: Finish) -> str:
        if finish.reason is FinishReason.LENGTH:
            is_asked = finish.usage.num_completion_tokens == self._max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded"
        if finish.stop_string is not None:
            return "stop_sequence"
        has_calls = any(block["type"] == "tool_use" for block in self._content)
        return "tool_use" if has_calls else "end_turn"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts; those that were cached are not among the input tokens."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def written(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Server-sent events."""
    return b"".join(
        f"event: {event['type']}\ndata: {encode_json(event)}\n\n".encode() for event in events
    )


def failure(error: RequestError) -> bytes:
    """The event of an error after the stream has begun."""
    return written([anthropic_body(error)])
