"""The bytes of a streamed answer.

Only the text differs from one chunk to the next, so everything around it is written once per
output and each chunk costs one string encoding.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import RequestError
from gateway.generation import Delta, Finish, FinishReason, Usage

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


def usage_body(usages: list[Usage]) -> dict[str, Any]:
    """Token counts of a request, summed over its outputs."""
    num_prompt = sum(usage.num_prompt_tokens for usage in usages)
    num_completion = sum(usage.num_completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.num_cached_tokens for u in usages)},
    }


def finish_fields(finish: Finish) -> dict[str, Any]:
    """How a choice ended; stop_reason names the stop string or stop token, if one did it."""
    by = finish.stop_token_id if finish.stop_string is None else finish.stop_string
    is_stop = finish.reason is FinishReason.STOP
    return {"finish_reason": finish.reason.value, "stop_reason": by if is_stop else None}


class ChunkWriter:
    """The chunks of one streamed answer."""

    def __init__(self, form: Form, answer: Mapping[str, Any], *, has_usage: bool) -> None:
        self._form = form
        self._answer = dict(answer)
        self._has_usage = has_usage
        self._usages: list[Usage] = []
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
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, {})

    def chunk(self, index: int, delta: Delta) -> bytes:
        """A delta; empty when there is nothing to show."""
        data = b""
        if delta.text:
            text = encode_json(delta.text)
            around = self._before_index, index, self._before_text, text, self._after_text
            data = "{}{}{}{}{}".format(*around).encode()
        if delta.finish is None:
            return data
        self._usages.append(delta.finish.usage)
        nothing: dict[str, Any] = {"delta": {}} if self._form.is_chat else {"text": ""}
        return data + self._choice(index, nothing, finish_fields(delta.finish))

    def _choice(self, index: int, content: Mapping[str, Any], end: Mapping[str, Any]) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **end}
        usage = {"usage": None} if self._has_usage else {}
        return event({**self._answer, "choices": [choice], **usage})

    def closing(self) -> bytes:
        """What follows the last choice's end."""
        if not self._has_usage:
            return DONE
        return event({**self._answer, "choices": [], "usage": usage_body(self._usages)}) + DONE


def whole_choice(form: Form, index: int, text: str, finish: Finish) -> dict[str, Any]:
    """A choice of an answer that is not streamed."""
    content: dict[str, Any] = {"text": text}
    if form.is_chat:
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    return {"index": index, **content, "logprobs": None, **finish_fields(finish)}
