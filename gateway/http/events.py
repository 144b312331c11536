"""Serializes streamed answers.

Only the text differs from one chunk to the next, so the rest is encoded once per output and each
chunk costs one string encoding.
"""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning, Reply
from gateway.errors.request_errors import RequestError, error_body
from gateway.http.logprobs import (
    as_id,
    as_text,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
)
from gateway.request.choices import total_usage
from gateway.request.generation import Finish, FinishReason, OutputDelta, Usage, WholeOutput
from gateway.text.logprobs import Candidate
from gateway.text.prompt_outputs import PromptOutputs

DONE = b"data: [DONE]\n\n"
THOUGHT_NAMES = ("reasoning_content", "reasoning")
CHAT_TEXT, COMPLETION_TEXT = '"delta":{"content":', '"text":'
CHAT_THOUGHT = f'"delta":{{"{THOUGHT_NAMES[0]}":'

# ASCII: raw U+2028 and others end a line for some readers of event streams.
encode_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Form:
    """The wire format of chats or completions."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    is_chat: bool


@dataclass(frozen=True, slots=True)
class Extras:
    """Parts of an answer in addition to its text."""

    has_usage: bool = False  # a stream ends with the token counts
    counts_usage: bool = False  # every chunk has those so far
    is_obfuscated: bool = False  # chunks are padded, so that their length tells no token
    has_token_ids: bool = False
    spells_ids: bool = False  # log probabilities name tokens as token_id:5
    echo: str = ""  # precedes the content of a chat

    @property
    def is_plain(self) -> bool:
        """True if chunks differ by their text alone."""
        return not (self.counts_usage or self.is_obfuscated)


NO_EXTRAS = Extras()
PADDED_CHARACTERS = 32  # the length of text and padding together is a multiple of it

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
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def logprobs_body(
    form: Form, output: OutputDelta | WholeOutput, *, spells_ids: bool = False
) -> dict[str, Any] | None:
    """Log probabilities of an output's tokens; None when not requested."""
    name = as_id if spells_ids else as_text
    if output.prompt is not None and output.prompt.echo is not None:
        scores, first_id = output.prompt.echo.scores, output.prompt.token_ids[0]
        if scores is not None:
            first = name(Candidate(first_id, math.nan, 0, scores.first_spelling))
            return echo_logprobs(scores, output.logprobs, first, name)
    if not output.logprobs:
        return None
    write = chat_logprobs if form.is_chat else completion_logprobs
    return write(output.logprobs, name)


def message_body(reply: Reply, echo: str = "") -> dict[str, Any]:
    """A whole answer; absent parts are left out, except the content, which `echo` precedes."""
    content = echo + reply.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning is not None:
        message |= dict.fromkeys(THOUGHT_NAMES, reply.reasoning)
    if reply.tool_calls:
        message["content"] = content or None
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
    """The end of a choice; stop_reason names the stop string or stop token, if there was one."""
    by = finish.stop_token_id if finish.stop_string is None else finish.stop_string
    is_stop = finish.reason is FinishReason.STOP
    reason = "tool_calls" if is_stop and has_calls else finish.reason.value
    return {"finish_reason": reason, "stop_reason": by if is_stop else None}


class ChunkWriter:
    """Serializes the chunks of one streamed answer."""

    def __init__(
        self,
        form: Form,
        answer: Mapping[str, Any],
        *,
        num_choices: int,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        self._form = form
        self._answer = dict(answer)
        self._num_choices = num_choices
        self._extras = extras
        self._usage: Usage | None = None  # of the choice that is written, so far
        self._usages: dict[int, Usage] = {}  # by choice
        self._have_calls: set[int] = set()  # choices with tool calls
        head = f"data: {encode_json(self._answer)[:-1]}"
        self._before_index = f'{head},"choices":[{{"index":'
        self._text_key = CHAT_TEXT if form.is_chat else COMPLETION_TEXT
        closing = "}" if form.is_chat else ""
        usage = ',"usage":null' if extras.has_usage else ""
        self._after_text = f'{closing},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def opening(self, index: int) -> bytes:
        """The chunk that begins a choice; empty where the form has none."""
        if not self._form.is_chat:
            return b""
        self._usage = None
        return self._choice(index, {"delta": {"role": "assistant", "content": self._extras.echo}})

    def chunk(self, index: int, delta: OutputDelta) -> bytes:
        """The chunk of a delta; empty when there is nothing to show."""
        data = b""
        self._usage = delta.usage
        if delta.prompt is not None or self._extras.has_token_ids:
            data = self._tokens(index, delta)
        if delta.prompt is not None and delta.prompt.echo is not None:
            delta = delta._replace(text=delta.prompt.echo.text + delta.text)
        if delta.parts is not None:
            data += self._parts(index, delta, delta.parts)
        elif (logprobs := self._logprobs(delta)) is not None:
            shown = {"content": delta.text} if self._form.is_chat else {"text": delta.text}
            content = {"delta": shown} if self._form.is_chat else shown
            data += self._choice(index, {**content, "logprobs": logprobs})
        elif delta.text:
            data += self._text(index, delta.text)
        if delta.finish is None:
            return data
        self._usages[index] = delta.finish.usage
        nothing: dict[str, Any] = {"delta": {}} if self._form.is_chat else {"text": ""}
        end = finish_fields(delta.finish, has_calls=index in self._have_calls)
        return data + self._choice(index, {**nothing, **end})

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        return logprobs_body(self._form, delta, spells_ids=self._extras.spells_ids)

    def _tokens(self, index: int, delta: OutputDelta) -> bytes:
        """The chunk of a delta's token ids and of what was asked about the prompt, without text."""
        of_prompt = prompt_fields(delta.prompt, self._extras)
        of_choice: dict[str, Any] = {}
        if self._extras.has_token_ids and delta.token_ids:
            of_choice["token_ids"] = delta.token_ids
        if not of_prompt and not of_choice:
            return b""
        if self._form.is_chat:
            return self._choice(index, {"delta": {}, **of_choice}, of_prompt)
        return self._choice(index, {"text": "", **of_choice, **of_prompt})

    def _text(self, index: int, text: str, *, is_thought: bool = False) -> bytes:
        """A chunk of text; newer clients read reasoning under the shorter name, older not."""
        if not self._extras.is_plain:
            names = THOUGHT_NAMES if is_thought else ("content",)
            delta = dict.fromkeys(names, text)
            return self._choice(index, {"delta": delta} if self._form.is_chat else {"text": text})
        key, shown = self._text_key, encode_json(text)
        if is_thought:
            key, shown = CHAT_THOUGHT, f'{shown},"{THOUGHT_NAMES[1]}":{shown}'
        around = self._before_index, index, key, shown, self._after_text
        return "{}{},{}{}{}".format(*around).encode()

    def _parts(self, index: int, delta: OutputDelta, parts: Sequence[Part]) -> bytes:
        """One chunk per part of a chat; log probabilities precede them in a chunk of their own."""
        data = b""
        if delta.logprobs:
            data = self._choice(index, {"delta": {}, "logprobs": self._logprobs(delta)})
        for part in parts:
            if isinstance(part, CallStart):
                self._have_calls.add(index)
            if isinstance(part, (Content, Reasoning)):
                data += self._text(index, part.text, is_thought=isinstance(part, Reasoning))
            else:
                data += self._choice(index, {"delta": {"tool_calls": [call_delta(part)]}})
        return data

    def _choice(
        self, index: int, fields: Mapping[str, Any], of_answer: Mapping[str, Any] | None = None
    ) -> bytes:
        """An event with one choice, and fields of the whole answer."""
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        chunk = {**self._answer, **(of_answer or {}), "choices": [choice]}
        if self._extras.has_usage:
            chunk["usage"] = None if self._usage is None else usage_body(self._usage)
        if self._extras.is_obfuscated:
            chunk["obfuscation"] = _padding(encode_json(choice))
        return event(chunk)

    def closing(self) -> bytes:
        """The events after the end of the last choice."""
        if not self._extras.has_usage:
            return DONE
        in_order = [usage for _, usage in sorted(self._usages.items())]
        usage = usage_body(total_usage(in_order, self._num_choices))
        return event({**self._answer, "choices": [], "usage": usage}) + DONE


def _padding(shown: str) -> str:
    """Random characters that hide how long a chunk is."""
    return secrets.token_hex(PADDED_CHARACTERS)[: -len(shown) % PADDED_CHARACTERS]


def prompt_fields(prompt: PromptOutputs | None, extras: Extras) -> dict[str, Any]:
    """Answers to what a request asked about its prompt, apart from the echo."""
    if prompt is None:
        return {}
    fields: dict[str, Any] = {}
    if prompt.scores is not None:
        name = as_id if extras.spells_ids else as_text
        fields["prompt_logprobs"] = prompt_logprobs(prompt.scores, name)
    if extras.has_token_ids:
        fields["prompt_token_ids"] = list(prompt.token_ids)
    return fields


def whole_choice(
    form: Form, index: int, output: WholeOutput, extras: Extras = NO_EXTRAS
) -> dict[str, Any]:
    """A choice of an answer that is not streamed."""
    prompt = output.prompt
    echoed = prompt.echo.text if prompt is not None and prompt.echo is not None else ""
    content: dict[str, Any] = {"text": echoed + output.text}
    has_calls = False
    if form.is_chat:
        reply = output.reply
        has_calls = bool(reply.tool_calls)
        content = {"message": message_body(reply, extras.echo)}
    else:
        content |= prompt_fields(prompt, extras)
    if extras.has_token_ids:
        content["token_ids"] = output.token_ids
    end = finish_fields(output.finish, has_calls=has_calls)
    logprobs = logprobs_body(form, output, spells_ids=extras.spells_ids)
    return {"index": index, **content, "logprobs": logprobs, **end}


def beside_choices(
    form: Form, outputs: Sequence[WholeOutput], extras: Extras = NO_EXTRAS
) -> dict[str, Any]:
    """Fields that an answer has once for all its choices."""
    return prompt_fields(outputs[0].prompt, extras) if form.is_chat else {}
