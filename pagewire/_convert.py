"""Protobuf at one edge: arguments to requests, responses to values. Pure; knows no channel."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from pagewire._errors import Internal, InvalidArgument
from pagewire._structure import to_structured_output
from pagewire._types import (
    CallOptions,
    Completion,
    Delta,
    Embeddings,
    FinishReason,
    Message,
    Messages,
    Model,
    Pooling,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from pagewire.v1 import embedding_pb2, types_pb2
from pagewire.v1 import inference_pb2 as pb

FINISH_REASON = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    types_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}

POOLING: Mapping[Pooling, types_pb2.Pooling] = {
    "last": types_pb2.POOLING_LAST,
    "mean": types_pb2.POOLING_MEAN,
}

_TOKEN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
)
_CALL_FIELDS = (
    "model",
    "request_id",
    "priority",
    "tenant",
    "cache_salt",
    "skip_prefix_cache",
)
_TEXT_FIELDS = ("include_stop_str_in_output", "skip_special_tokens")


def to_generate(
    prompt: Prompt, params: SamplingParams | None, options: CallOptions
) -> pb.GenerateRequest:
    """Arguments of generate."""
    return pb.GenerateRequest(prompt=_to_prompt(prompt), options=_to_options(params, options))


def to_stream(
    prompt: Prompt, params: SamplingParams | None, options: CallOptions
) -> pb.GenerateStreamRequest:
    """Arguments of stream."""
    return pb.GenerateStreamRequest(prompt=_to_prompt(prompt), options=_to_options(params, options))


def to_chat(
    messages: Messages, params: SamplingParams | None, options: CallOptions
) -> pb.ChatRequest:
    """Arguments of chat."""
    return pb.ChatRequest(messages=_to_messages(messages), options=_to_options(params, options))


def to_stream_chat(
    messages: Messages, params: SamplingParams | None, options: CallOptions
) -> pb.ChatStreamRequest:
    """Arguments of stream_chat."""
    return pb.ChatStreamRequest(
        messages=_to_messages(messages), options=_to_options(params, options)
    )


def to_batch(
    prompts: Sequence[Prompt], params: SamplingParams | None, options: CallOptions
) -> list[pb.GenerateRequest]:
    """Arguments of batch; a request_id gets the index of each prompt appended."""
    if isinstance(prompts, str):
        raise InvalidArgument("prompts: needs a list of prompts, not one string")
    requests = [to_generate(prompt, params, options) for prompt in prompts]
    if request_id := options.get("request_id"):
        for index, request in enumerate(requests):
            request.options.request_id = f"{request_id}-{index}"
    return requests


def _to_options(params: SamplingParams | None, options: CallOptions) -> pb.GenerationOptions:
    """Keywords win over `params`; one that neither knows is a TypeError, as for any function."""
    sampling: dict[str, Any] = {**options}
    sampling.pop("timeout_s", None)  # the channel's business
    message = pb.GenerationOptions()
    _set(message, {name: sampling.pop(name, None) for name in _CALL_FIELDS})
    params = replace(params or SamplingParams(), **sampling)
    _set(message, {name: getattr(params, name) for name in _TEXT_FIELDS})
    _set(message.sampling, {name: getattr(params, name) for name in _TOKEN_FIELDS})
    _extend(message, "stop", [params.stop] if isinstance(params.stop, str) else params.stop)
    _extend(message, "bad_words", params.bad_words)
    _extend(message.sampling, "stop_token_ids", params.stop_token_ids)
    _extend(message.sampling, "allowed_token_ids", params.allowed_token_ids)
    for token_id, bias in (params.logit_bias or {}).items():
        entry = message.sampling.logit_bias.add()
        _set(entry, {"token_id": token_id, "bias": bias}, name="logit_bias")
    if params.structured_output is not None:
        message.structured_output.CopyFrom(to_structured_output(params.structured_output))
    return message


def _to_prompt(prompt: Prompt) -> pb.Prompt:
    """Text, or token ids as they are."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    token_ids = pb.TokenIds()
    _extend(token_ids, "ids", prompt, name="prompt")
    return pb.Prompt(token_ids=token_ids)


def _to_messages(messages: Messages) -> list[pb.ChatMessage]:
    """A conversation; a bare string is one turn of the user."""
    if isinstance(messages, str):
        return [pb.ChatMessage(role="user", content=messages)]
    return [_to_message(index, message) for index, message in enumerate(messages)]


def _to_message(index: int, message: Message | Mapping[str, str]) -> pb.ChatMessage:
    if isinstance(message, Message):
        message = {"role": message.role, "content": message.content}
    if unknown := sorted(message.keys() - {"role", "content"}):
        raise InvalidArgument(f"messages[{index}].{unknown[0]}: not supported")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise InvalidArgument(f"messages[{index}].{name}: needs a string")
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _set(target: ProtoMessage, values: Mapping[str, object], *, name: str = "") -> None:
    for field, value in values.items():
        if value is None:
            continue
        try:
            setattr(target, field, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name or field}: {value!r} does not fit ({error})") from None


def _extend(target: ProtoMessage, field: str, values: Iterable[object], *, name: str = "") -> None:
    try:
        getattr(target, field).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name or field}: {error}") from None


def to_tokenize(text: Messages, model: str, add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """A string is tokenized as text, anything else as a conversation."""
    request = pb.TokenizeRequest(model=model)
    if isinstance(text, str):
        request.text = text
    else:
        request.conversation.messages.extend(_to_messages(text))
    _set(request, {"add_special_tokens": add_special_tokens})
    return request


def to_detokenize(
    token_ids: Sequence[int], model: str, skip_special_tokens: bool | None
) -> pb.DetokenizeRequest:
    """Ids to be turned into text."""
    request = pb.DetokenizeRequest(model=model)
    _extend(request, "token_ids", token_ids)
    _set(request, {"skip_special_tokens": skip_special_tokens})
    return request


def to_completion(response: pb.GenerateResponse | pb.ChatResponse) -> Completion:
    """A whole answer."""
    output = response.output
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
    )


def to_embed(
    inputs: str | Sequence[Prompt],
    pooling: Pooling,
    normalize: bool,
    model: str,
    request_id: str,
) -> embedding_pb2.EmbedRequest:
    """Texts or token ids to be embedded."""
    if pooling not in POOLING:
        raise InvalidArgument(f"pooling: {pooling!r} is neither 'last' nor 'mean'")
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if any(isinstance(one, int) for one in inputs):
        raise InvalidArgument("inputs: needs a list of prompts, not the token ids of one")
    return embedding_pb2.EmbedRequest(
        inputs=map(_to_prompt, inputs),
        pooling=POOLING[pooling],
        normalize=normalize,
        model=model,
        request_id=request_id,
    )


def to_embeddings(response: embedding_pb2.EmbedResponse) -> Embeddings:
    """Vectors, in the order of the inputs."""
    return Embeddings(
        vectors=tuple(tuple(one.values) for one in response.embeddings),
        usage=_usage(response.usage),
        request_id=response.request_id,
        model=response.model,
    )


def _prompt_logprobs(output: pb.Output | pb.OutputDelta) -> tuple[TokenLogprobs | None, ...]:
    """One per token of the prompt; nothing precedes the first."""
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


def to_models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    """The models on offer."""
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


class Assembly:
    """Reads the messages of one stream and keeps what has come, so that the whole can be had."""

    def __init__(self) -> None:
        self.request_id = ""
        self.model = ""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._first: Delta | None = None
        self._last: Delta | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self._token_ids

    @property
    def is_finished(self) -> bool:
        """Whether the last message has come."""
        return self._last is not None and self._last.finish_reason is not None

    def read(self, response: pb.GenerateStreamResponse | pb.ChatStreamResponse) -> Delta:
        """The next piece."""
        self.request_id = self.request_id or response.request_id  # a resumed stream has another
        self.model = response.model
        output = response.delta
        finished = output.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
        delta = Delta(
            text=output.text,
            token_ids=tuple(output.token_ids),
            finish_reason=_finish_reason(output.finish_reason) if finished else None,
            usage=_usage(output.usage) if output.HasField("usage") else None,
            stop_reason=_stop_reason(output),
            logprobs=_logprobs(output.logprobs),
            prompt_token_ids=tuple(output.prompt_token_ids),
            prompt_logprobs=_prompt_logprobs(output),
        )
        self._first = self._first or delta
        self._logprobs.extend(delta.logprobs)
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._last = delta
        return delta

    def completion(self) -> Completion:
        """The whole; raises Internal when the stream ended without saying why."""
        first = self._first
        if first is None or self._last is None or self._last.finish_reason is None:
            raise Internal("the stream ended without a finish reason")
        return Completion(
            text=self.text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._last.finish_reason,
            usage=self._last.usage or Usage(),
            request_id=self.request_id,
            model=self.model,
            stop_reason=self._last.stop_reason,
            logprobs=tuple(self._logprobs),
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
        )
