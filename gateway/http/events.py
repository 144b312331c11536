"""The bytes of a streamed answer.

Only the text differs from one chunk to the next, so everything around it is written once per
output and each chunk costs one string encoding.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.choices import total_usage
from gateway.errors import RequestError
from gateway.generation import Completion, Delta, Finish, FinishReason, Usage
from gateway.http.logprobs import chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"

# ASCII: raw U+2028 and the like end a line for some readers of event streams.
encode_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Form:
    """How chats and completions differ on the wire."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    is_chat: bool


CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = Form("cmpl", "text_completion", "text_completion", is_chat=False)


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(payload).encode() + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """What a client reads when its stream fails half-way."""
    return event(error_body(error))


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON body of every failure."""
    wire = error.wire
    inner = {
        "message": error.message,
        "type": wire.type,
        "param": error.field,
        "code": wire.code,
    }
    return {"error": inner}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts of a request."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def logprobs_body(form: Form, output: Delta | Completion) -> dict[str, Any] | None:
    """What is known of an output's tokens; None when nobody asked."""
    if not output.logprobs:
        return None
    write = chat_logprobs if form.is_chat else completion_logprobs
    return write(output.logprobs)


def finish_fields(finish: Finish) -> dict[str, Any]:
    """How a choice ended; stop_reason names the stop string or stop token, if one did it."""
    by = finish.stop_token_id if finish.stop_string is None else finish.stop_string
    is_stop = finish.reason is FinishReason.STOP
    return {"finish_reason": finish.reason.value, "stop_reason": by if is_stop else None}


class ChunkWriter:
    """The chunks of one streamed answer."""

    def __init__(
        self, form: Form, answer: Mapping[str, Any], *, num_choices: int, has_usage: bool
    ) -> None:
        self._form = form
        self._answer = dict(answer)
        self._num_choices = num_choices
        self._has_usage = has_usage
        self._usages: dict[int, Usage] = {}  # by choice
        head = f"data: {encode_json(self._answer)[:-1]}"
        opening = '"delta":{"content":' if form.is_chat else '"text":'
        self._before_index = f'{head},"choices":[{{"index":'
        self._before_text = f",{opening}"
        closing = "}" if form.is_chat else ""
        usage = ',"usage":null' if has_usage else ""
        self._after_text = f'{closing},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def opening(self, index: int) -> bytes:
        """The chunk that begins a choice; empty where the form has none."""
        if not self._form.is_chat:
            return b""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, index: int, delta: Delta) -> bytes:
        """A delta; empty when there is nothing to show."""
        data = b""
        if delta.logprobs:
            shown = {"content": delta.text} if self._form.is_chat else {"text": delta.text}
            content = {"delta": shown} if self._form.is_chat else shown
            data = self._choice(index, {**content, "logprobs": logprobs_body(self._form, delta)})
        elif delta.text:
            text = encode_json(delta.text)
            around = self._before_index, index, self._before_text, text, self._after_text
            data = "{}{}{}{}{}".format(*around).encode()
        if delta.finish is None:
            return data
        self._usages[index] = delta.finish.usage
        nothing: dict[str, Any] = {"delta": {}} if self._form.is_chat else {"text": ""}
        return data + self._choice(index, {**nothing, **finish_fields(delta.finish)})

    def _choice(self, index: int, fields: Mapping[str, Any]) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        usage = {"usage": None} if self._has_usage else {}
        return event({**self._answer, "choices": [choice], **usage})

    def closing(self) -> bytes:
        """What follows the last choice's end."""
        if not self._has_usage:
            return DONE
        in_order = [usage for _, usage in sorted(self._usages.items())]
        usage = usage_body(total_usage(in_order, self._num_choices))
        return event({**self._answer, "choices": [], "usage": usage}) + DONE


def whole_choice(form: Form, index: int, output: Completion) -> dict[str, Any]:
    """A choice of an answer that is not streamed."""
    content: dict[str, Any] = {"text": output.text}
    if form.is_chat:
        content = {"message": {"role": "assistant", "content": output.text, "refusal": None}}
    logprobs = logprobs_body(form, output)
    return {"index": index, **content, "logprobs": logprobs, **finish_fields(output.finish)}
