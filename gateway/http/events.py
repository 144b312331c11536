"""Serializes streamed answers.

Only the text differs from one chunk to the next, so the rest is encoded once per output and each
chunk costs one string encoding.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning, Reply
from gateway.choices import total_usage
from gateway.errors import RequestError, error_body
from gateway.generation import Finish, FinishReason, OutputDelta, Usage, WholeOutput
from gateway.http.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
)

DONE = b"data: [DONE]\n\n"
TEXT_KEYS: dict[type[Part], str] = {
    Content: '"delta":{"content":',
    Reasoning: '"delta":{"reasoning_content":',
}

# ASCII: raw U+2028 and others end a line for some readers of event streams.
encode_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Form:
    """The wire format of chats or completions."""

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
    """The event of an error after the stream has begun."""
    return event(error_body(error))


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts of a request."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def logprobs_body(form: Form, output: OutputDelta | WholeOutput) -> dict[str, Any] | None:
    """Log probabilities of an output's tokens; None when not requested."""
    echo = None if output.prompt is None else output.prompt.echo
    if echo is not None and echo.scores is not None:
        return echo_logprobs(echo.scores, output.logprobs)
    if not output.logprobs:
        return None
    write = chat_logprobs if form.is_chat else completion_logprobs
    return write(output.logprobs)


def message_body(reply: Reply) -> dict[str, Any]:
    """A whole answer; absent parts are left out, except the content."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return message


def call_delta(part: CallStart | CallArguments) -> dict[str, Any]:
    """The change of a streamed chat's tool calls by one part."""
    match part:
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"index": index, "id": call_id, "type": "function", "function": function}
        case CallArguments(index, text):
            return {"index": index, "function": {"arguments": text}}


def finish_fields(finish: Finish, *, has_calls: bool = False) -> dict[str, Any]:
    """How a choice ended; stop_reason names the stop string or stop token, if there was one."""
    by = finish.stop_token_id if finish.stop_string is None else finish.stop_string
    is_stop = finish.reason is FinishReason.STOP
    reason = "tool_calls" if is_stop and has_calls else finish.reason.value
    return {"finish_reason": reason, "stop_reason": by if is_stop else None}


class ChunkWriter:
    """Serializes the chunks of one streamed answer."""

    def __init__(
        self, form: Form, answer: Mapping[str, Any], *, num_choices: int, has_usage: bool
    ) -> None:
        self._form = form
        self._answer = dict(answer)
        self._num_choices = num_choices
        self._has_usage = has_usage
        self._usages: dict[int, Usage] = {}  # by choice
        self._have_calls: set[int] = set()  # choices with tool calls
        head = f"data: {encode_json(self._answer)[:-1]}"
        self._before_index = f'{head},"choices":[{{"index":'
        self._text_key = TEXT_KEYS[Content] if form.is_chat else '"text":'
        closing = "}" if form.is_chat else ""
        usage = ',"usage":null' if has_usage else ""
        self._after_text = f'{closing},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def opening(self, index: int) -> bytes:
        """The chunk that begins a choice; empty where the form has none."""
        if not self._form.is_chat:
            return b""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, index: int, delta: OutputDelta) -> bytes:
        """The chunk of a delta; empty when there is nothing to show."""
        data = b""
        if delta.prompt is not None and delta.prompt.echo is not None:
            delta = delta._replace(text=delta.prompt.echo.text + delta.text)
        if delta.parts is not None:
            data = self._parts(index, delta, delta.parts)
        elif (logprobs := logprobs_body(self._form, delta)) is not None:
            shown = {"content": delta.text} if self._form.is_chat else {"text": delta.text}
            content = {"delta": shown} if self._form.is_chat else shown
            data = self._choice(index, {**content, "logprobs": logprobs})
        elif delta.text:
            data = self._text(index, self._text_key, delta.text)
        if delta.finish is None:
            return data
        self._usages[index] = delta.finish.usage
        nothing: dict[str, Any] = {"delta": {}} if self._form.is_chat else {"text": ""}
        end = finish_fields(delta.finish, has_calls=index in self._have_calls)
        return data + self._choice(index, {**nothing, **end})

    def _text(self, index: int, key: str, text: str) -> bytes:
        around = self._before_index, index, key, encode_json(text), self._after_text
        return "{}{},{}{}{}".format(*around).encode()

    def _parts(self, index: int, delta: OutputDelta, parts: Sequence[Part]) -> bytes:
        """One chunk per part of a chat; log probabilities precede them in a chunk of their own."""
        data = b""
        if delta.logprobs:
            logprobs = logprobs_body(self._form, delta)
            data = self._choice(index, {"delta": {}, "logprobs": logprobs})
        for part in parts:
            if isinstance(part, CallStart):
                self._have_calls.add(index)
            if isinstance(part, (Content, Reasoning)):
                data += self._text(index, TEXT_KEYS[type(part)], part.text)
            else:
                data += self._choice(index, {"delta": {"tool_calls": [call_delta(part)]}})
        return data

    def _choice(self, index: int, fields: Mapping[str, Any]) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        usage = {"usage": None} if self._has_usage else {}
        return event({**self._answer, "choices": [choice], **usage})

    def closing(self) -> bytes:
        """The events after the end of the last choice."""
        if not self._has_usage:
            return DONE
        in_order = [usage for _, usage in sorted(self._usages.items())]
        usage = usage_body(total_usage(in_order, self._num_choices))
        return event({**self._answer, "choices": [], "usage": usage}) + DONE


def whole_choice(form: Form, index: int, output: WholeOutput) -> dict[str, Any]:
    """A choice of an answer that is not streamed."""
    prompt = output.prompt
    echoed = prompt.echo.text if prompt is not None and prompt.echo is not None else ""
    content: dict[str, Any] = {"text": echoed + output.text}
    has_calls = False
    if form.is_chat:
        reply = output.reply
        has_calls = bool(reply.tool_calls)
        content = {"message": message_body(reply)}
    elif prompt is not None and prompt.scores is not None:
        content["prompt_logprobs"] = prompt_logprobs(prompt.scores)
    end = finish_fields(output.finish, has_calls=has_calls)
    return {"index": index, **content, "logprobs": logprobs_body(form, output), **end}


def beside_choices(form: Form, outputs: Sequence[WholeOutput]) -> dict[str, Any]:
    """Fields that an answer has once for all its choices."""
    prompt = outputs[0].prompt
    if not form.is_chat or prompt is None or prompt.scores is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(prompt.scores)}
