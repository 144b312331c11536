"""Converts responses to values. Pure; uses no channel."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from pagewire._chat import ToolCall, ToolCallDelta
from pagewire._errors import Internal
from pagewire._structure import ModelClass, parsed
from pagewire._types import (
    Completion,
    Delta,
    Embeddings,
    FinishReason,
    Model,
    Timings,
    TokenLogprobs,
    Usage,
)
from pagewire.v1 import embedding_pb2, types_pb2
from pagewire.v1 import inference_pb2 as pb

_T = TypeVar("_T")

FINISH_REASON = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    types_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def to_completion(
    response: pb.GenerateResponse | pb.ChatResponse,
    began_s: float | None = None,
    model: type[ModelClass] | None = None,
) -> Completion:
    """The value of a whole answer to a call that began then, on this process's clock.

    Raises InvalidOutput where the model class refuses an output.
    """
    mine = None if began_s is None else Timings("client", time.monotonic() - began_s)
    first, *more = (
        _parsed(replace(_to_one(output, response), timings=_timings(output) or mine), model)
        for output in (response.output, *response.more_outputs)
    )
    return replace(first, more=tuple(more))


def _parsed(completion: Completion, model: type[ModelClass] | None) -> Completion:
    """The completion with its object; without one if it was cut off, or asks for tools."""
    if model is None or completion.tool_calls or completion.finish_reason is not FinishReason.STOP:
        return completion
    return replace(completion, parsed=parsed(completion.text, model))


def _timings(output: pb.Output | pb.OutputDelta) -> Timings | None:
    if not output.HasField("timings"):
        return None
    told = output.timings
    return Timings(
        "gateway",
        told.total_s,
        told.queue_s if told.HasField("queue_s") else None,
        told.first_token_s if told.HasField("first_token_s") else None,
        told.per_token_s if told.HasField("per_token_s") else None,
    )


def _to_one(output: pb.Output, response: pb.GenerateResponse | pb.ChatResponse) -> Completion:
    return Completion(
        text=output.text,
        token_ids=tuple(output.token_ids),
        finish_reason=_finish_reason(output.finish_reason),
        usage=_usage(output.usage),
        request_id=response.request_id,
        model=response.model,
        stop_reason=_stop_reason(output),
        logprobs=_logprobs(output.logprobs),
        prompt_token_ids=tuple(output.prompt_token_ids),
        prompt_logprobs=_prompt_logprobs(output),
        reasoning=output.reasoning,
        tool_calls=tuple(ToolCall(c.id, c.name, c.arguments) for c in output.tool_calls),
    )


def to_embeddings(response: embedding_pb2.EmbedResponse) -> Embeddings:
    """Vectors, in the order of the inputs."""
    return Embeddings(
        vectors=tuple(tuple(one.values) for one in response.embeddings),
        usage=_usage(response.usage),
        request_id=response.request_id,
        model=response.model,
    )


def to_models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    """The served models."""
    return tuple(
        Model(
            name=model.model,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=tuple(model.eos_token_ids),
            dtype=model.dtype,
        )
        for model in response.models
    )


@dataclass(slots=True)
class _Arrivals:
    """When the pieces of one output came, in seconds since its call began."""

    first_token_s: float | None = None
    last_s: float = 0.0
    num_tokens_after: int = 0  # the first message that has tokens
    told: Timings | None = None  # by the gateway

    def note(self, output: pb.OutputDelta, now_s: float) -> None:
        self.last_s, self.told = now_s, _timings(output)
        if self.first_token_s is not None:
            self.num_tokens_after += len(output.token_ids)
        elif output.token_ids:
            self.first_token_s = now_s

    def timings(self, is_resumed: bool) -> Timings:
        if self.told is not None and not is_resumed:
            return self.told
        first_s, per_token_s = self.first_token_s, None
        if first_s is not None and self.num_tokens_after:
            per_token_s = (self.last_s - first_s) / self.num_tokens_after
        return Timings("client", self.last_s, None, first_s, per_token_s)


class Assembly:
    """Reads the messages of one stream and accumulates the output."""

    def __init__(self, num_outputs: int = 1, model: type[ModelClass] | None = None) -> None:
        self.request_id = ""
        self.is_resumed = False  # set when a second call goes on
        self._model = ""
        self._model_class = model
        self._outputs: list[list[Delta]] = [[] for _ in range(num_outputs)]
        self._began_s = time.monotonic()
        self._arrivals = [_Arrivals() for _ in range(num_outputs)]

    @property
    def text(self) -> str:
        """The text so far, of the first output."""
        return "".join(delta.text for delta in self._outputs[0])

    @property
    def resumed(self) -> list[pb.ResumedOutput]:
        """The state of each output so far."""
        return [
            pb.ResumedOutput(
                token_ids=_joined(delta.token_ids for delta in deltas),
                is_finished=bool(deltas) and deltas[-1].finish_reason is not None,
            )
            for deltas in self._outputs
        ]

    @property
    def is_finished(self) -> bool:
        """True if the last message has arrived."""
        return all(deltas and deltas[-1].finish_reason is not None for deltas in self._outputs)

    def read(self, response: pb.GenerateStreamResponse | pb.ChatStreamResponse) -> Delta:
        """Returns the message as a Delta."""
        self.request_id = self.request_id or response.request_id  # a resumed stream has another id
        self._model = response.model
        delta = _to_delta(response.delta)
        if delta.index >= len(self._outputs):
            raise Internal(f"the server sent output {delta.index} of {len(self._outputs)}")
        self._outputs[delta.index].append(delta)
        self._arrivals[delta.index].note(response.delta, time.monotonic() - self._began_s)
        return delta

    def check_end(self) -> None:
        """Raises Internal when an output has no finish reason."""
        if not self.is_finished:
            raise Internal("the stream ended without a finish reason")

    def completion(self) -> Completion:
        """The whole output.

        Raises Internal when the stream ended without a finish reason, and InvalidOutput where the
        model class refuses an output.
        """
        self.check_end()
        first, *more = (
            replace(
                _parsed(self._completion_of(deltas), self._model_class),
                timings=arrivals.timings(self.is_resumed),
            )
            for deltas, arrivals in zip(self._outputs, self._arrivals, strict=True)
        )
        return replace(first, more=tuple(more))

    def _completion_of(self, deltas: Sequence[Delta]) -> Completion:
        first, last = deltas[0], deltas[-1]
        assert last.finish_reason is not None
        return Completion(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(_joined(delta.token_ids for delta in deltas)),
            finish_reason=last.finish_reason,
            usage=last.usage or Usage(),
            request_id=self.request_id,
            model=self._model,
            stop_reason=last.stop_reason,
            logprobs=tuple(_joined(delta.logprobs for delta in deltas)),
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=_whole_calls(_joined(delta.tool_calls for delta in deltas)),
        )


def _to_delta(output: pb.OutputDelta) -> Delta:
    finished = output.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
    return Delta(
        text=output.text,
        token_ids=tuple(output.token_ids),
        finish_reason=_finish_reason(output.finish_reason) if finished else None,
        usage=_usage(output.usage) if output.HasField("usage") else None,
        stop_reason=_stop_reason(output),
        logprobs=_logprobs(output.logprobs),
        prompt_token_ids=tuple(output.prompt_token_ids),
        prompt_logprobs=_prompt_logprobs(output),
        reasoning=output.reasoning,
        tool_calls=tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments)
            for call in output.tool_calls
        ),
        index=output.index,
    )


def _whole_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        before = calls.get(piece.index, ToolCall("", "", ""))
        calls[piece.index] = ToolCall(
            before.id + piece.id, before.name + piece.name, before.arguments + piece.arguments
        )
    return tuple(calls[index] for index in sorted(calls))


def _joined(parts: Iterable[Iterable[_T]]) -> list[_T]:
    return list(chain.from_iterable(parts))


def _prompt_logprobs(output: pb.Output | pb.OutputDelta) -> tuple[TokenLogprobs | None, ...]:
    """One per token of the prompt; None for the first, which has no predecessor."""
    if not output.prompt_token_ids:
        return ()
    return (None, *_logprobs(output.prompt_logprobs))


def _logprobs(tokens: Iterable[types_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token.logprob,
            token.rank,
            tuple(zip(token.top_token_ids, token.top_logprobs, strict=True)),
        )
        for token in tokens
    )


def _finish_reason(reason: types_pb2.FinishReason) -> FinishReason:
    if reason not in FINISH_REASON:
        raise Internal(f"the server ended an output for an unknown reason ({reason})")
    return FINISH_REASON[reason]


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _stop_reason(output: pb.Output | pb.OutputDelta) -> str | int | None:
    if output.HasField("stop_string"):
        return output.stop_string
    return output.stop_token_id if output.HasField("stop_token_id") else None
