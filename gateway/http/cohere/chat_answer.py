"""The answer of Cohere's `/v2/chat` as it grows, and its events. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.events import encode_json
from gateway.request.generation import Finish, FinishReason, Usage
from gateway.text.logprobs import OutputTokenLogprobs

Event = dict[str, Any]


class CohereAnswer:
    """One answer: pieces of text and thinking, and calls."""

    def __init__(self, answer_id: str) -> None:
        self._content: list[Event] = []
        self._calls: list[Event] = []
        self._pieces: list[str] = []  # of what is open
        self._is_open = False
        self._is_call_open = False
        self._logprobs: list[Event] = []
        self._num_shown_logprobs = 0  # in events, with the text that follows them
        self.body: Event = {"id": answer_id}

    def begin(self) -> list[Event]:
        """The event before the first text."""
        empty = {"content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        message = {"role": "assistant"} | empty
        return [{"type": "message-start", "delta": {"message": message}} | self.body]

    def add(
        self, parts: Iterable[Part], logprobs: Sequence[OutputTokenLogprobs] = ()
    ) -> list[Event]:
        """Adds parts of the answer; returns the events."""
        events = [event for part in parts for event in self._add(part)]
        self._logprobs += map(_logprob_body, logprobs)
        pieces = [event for event in events if event["type"] == "content-delta"]
        found = self._logprobs[self._num_shown_logprobs :]
        if pieces and found:
            pieces[0]["logprobs"] = _joined(found)
            self._num_shown_logprobs = len(self._logprobs)
        return events

    def _add(self, part: Part) -> list[Event]:
        match part:
            case CallStart():
                return [*self._close(), self._open_call(part)]
            case CallArguments():
                self._pieces.append(part.text)
                change = {"tool_calls": {"function": {"arguments": part.text}}}
                return [self._call_event("tool-call-delta", change)]
            case Reasoning():
                return self._grow("thinking", part.text)
            case Content():
                return self._grow("text", part.text)

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self._content[-1]["type"] != kind:
            events = self._close()
            self._content.append({"type": kind, kind: ""})
            self._is_open = True
            start = {"content": {"type": kind, kind: ""}}
            events.append(self._content_event("content-start", start))
        self._pieces.append(text)
        return [*events, self._content_event("content-delta", {"content": {kind: text}})]

    def _open_call(self, call: CallStart) -> Event:
        function = {"name": call.name, "arguments": ""}
        self._calls.append({"id": call.id, "type": "function", "function": function})
        self._is_call_open = True
        shown = self._calls[-1] | {"function": dict(function)}  # a copy: the call grows
        return self._call_event("tool-call-start", {"tool_calls": shown})

    def _close(self) -> list[Event]:
        text, self._pieces = "".join(self._pieces), []
        if self._is_call_open:
            self._is_call_open = False
            self._calls[-1]["function"]["arguments"] = text
            return [{"type": "tool-call-end", "index": len(self._calls) - 1}]
        if self._is_open:
            self._is_open = False
            piece = self._content[-1]
            piece[piece["type"]] = text
            return [{"type": "content-end", "index": len(self._content) - 1}]
        return []

    def _content_event(self, kind: str, message: Event) -> Event:
        return {"type": kind, "index": len(self._content) - 1, "delta": {"message": message}}

    def _call_event(self, kind: str, message: Event) -> Event:
        return {"type": kind, "index": len(self._calls) - 1, "delta": {"message": message}}

    def end(self, finish: Finish, *, has_logprobs: bool = False) -> list[Event]:
        """The events of the end; afterwards the body is the whole answer.

        Raises RequestError for an answer that was aborted, for which the API has no reason.
        """
        if finish.reason is FinishReason.ABORT:
            raise RequestError(ErrorKind.CANCELLED, "the request was aborted")
        events = self._close()
        reason, usage = self._finish_reason(finish), usage_body(finish.usage)
        message: Event = {"role": "assistant", "content": self._content}
        if self._calls:
            message["tool_calls"] = self._calls
        self.body |= {"finish_reason": reason, "message": message, "usage": usage}
        if has_logprobs:
            self.body["logprobs"] = self._logprobs
        delta = {"finish_reason": reason, "usage": usage}
        return [*events, {"type": "message-end", "id": self.body["id"], "delta": delta}]

    def _finish_reason(self, finish: Finish) -> str:
        if finish.reason is FinishReason.LENGTH:
            return "MAX_TOKENS"
        if self._calls:
            return "TOOL_CALL"
        return "COMPLETE" if finish.stop_string is None else "STOP_SEQUENCE"


def usage_body(usage: Usage) -> Event:
    """Token counts: what was billed elsewhere is the same here."""
    counts = {
        "input_tokens": usage.num_prompt_tokens,
        "output_tokens": usage.num_completion_tokens,
    }
    return {
        "billed_units": counts,
        "tokens": dict(counts),
        "cached_tokens": usage.num_cached_tokens,
    }


def written(events: Iterable[Event]) -> bytes:
    """Server-sent events."""
    return b"".join(
        f"event: {event['type']}\ndata: {encode_json(event)}\n\n".encode() for event in events
    )


def failure(error: RequestError) -> bytes:
    """The last event of a stream that fails after it has begun."""
    delta = {"finish_reason": "ERROR", "error": error.message}
    return written([{"type": "message-end", "delta": delta}])


def _logprob_body(token: OutputTokenLogprobs) -> Event:
    sampled = token.sampled
    text = sampled.spelling.decode(errors="replace")
    return {"token_ids": [sampled.token_id], "text": text, "logprobs": [sampled.logprob]}


def _joined(tokens: Sequence[Event]) -> Event:
    """Several tokens as one entry."""
    return {
        "token_ids": [token_id for token in tokens for token_id in token["token_ids"]],
        "text": "".join(token["text"] for token in tokens),
        "logprobs": [logprob for token in tokens for logprob in token["logprobs"]],
    }
