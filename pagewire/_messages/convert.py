"""Converts arguments to requests. Pure; uses no channel."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from pagewire._beams import to_beam_search
from pagewire._chat import ChatOptions, Messages
from pagewire._errors import InvalidArgument
from pagewire._messages.conversation import to_chat_options, to_messages
from pagewire._messages.fields import extend, set_fields
from pagewire._structure import ModelClass, model_class, to_structured_output
from pagewire._types import (
    BatchParams,
    CallOptions,
    ChatCallOptions,
    Pooling,
    Prompt,
    SamplingParams,
)
from pagewire.v1 import embedding_pb2, types_pb2
from pagewire.v1 import inference_pb2 as pb

POOLING: Mapping[Pooling, types_pb2.Pooling] = {
    "last": types_pb2.POOLING_LAST,
    "mean": types_pb2.POOLING_MEAN,
}

_One = TypeVar("_One")
_Whole = TypeVar("_Whole", pb.GenerateRequest, pb.ChatRequest)
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
    "skip_speculation",
)
_CALL_FIELDS = (
    "model",
    "request_id",
    "priority",
    "tenant",
    "cache_salt",
    "skip_prefix_cache",
    "n",
    "idempotency_key",
)
_TEXT_FIELDS = ("include_stop_str_in_output", "skip_special_tokens")


def to_generate(
    prompt: Prompt, params: SamplingParams | None, options: CallOptions
) -> pb.GenerateRequest:
    """The request of generate."""
    return pb.GenerateRequest(prompt=_to_prompt(prompt), options=_to_options(params, options))


def to_stream(
    prompt: Prompt, params: SamplingParams | None, options: CallOptions
) -> pb.GenerateStreamRequest:
    """The request of stream."""
    _check_stream(options)
    return pb.GenerateStreamRequest(prompt=_to_prompt(prompt), options=_to_options(params, options))


def to_chat(
    messages: Messages, params: SamplingParams | None, options: ChatCallOptions
) -> pb.ChatRequest:
    """The request of chat."""
    return pb.ChatRequest(
        messages=to_messages(messages),
        options=_to_options(params, _of_any_call(options)),
        chat=to_chat_options(options),
    )


def to_stream_chat(
    messages: Messages, params: SamplingParams | None, options: ChatCallOptions
) -> pb.ChatStreamRequest:
    """The request of stream_chat."""
    _check_stream(options)
    return pb.ChatStreamRequest(
        messages=to_messages(messages),
        options=_to_options(params, _of_any_call(options)),
        chat=to_chat_options(options),
    )


def to_batch(
    prompts: Sequence[Prompt], params: BatchParams, options: CallOptions
) -> list[tuple[pb.GenerateRequest, SamplingParams | None]]:
    """The requests of batch with their parameters; ids and keys get the index of each prompt."""
    pairs = _paired("prompts", prompts, params)
    requests = _numbered([to_generate(prompt, own, options) for prompt, own in pairs])
    return [(request, own) for request, (_, own) in zip(requests, pairs, strict=True)]


def to_batch_chat(
    conversations: Sequence[Messages], params: BatchParams, options: ChatCallOptions
) -> list[tuple[pb.ChatRequest, SamplingParams | None]]:
    """The requests of batch_chat; otherwise like to_batch."""
    pairs = _paired("conversations", conversations, params)
    requests = _numbered([to_chat(messages, own, options) for messages, own in pairs])
    return [(request, own) for request, (_, own) in zip(requests, pairs, strict=True)]


def _paired(
    name: str, given: Iterable[_One], params: BatchParams
) -> list[tuple[_One, SamplingParams | None]]:
    """Each one of a batch with its parameters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        found = "one string" if isinstance(given, str) else repr(given)
        raise InvalidArgument(f"{name}: needs a list of {name}, not {found}")
    ones = list(given)
    if params is None or isinstance(params, SamplingParams):
        return [(one, params) for one in ones]
    if len(params) != len(ones):
        raise InvalidArgument(f"params: {len(params)} for {len(ones)} {name}")
    return list(zip(ones, params, strict=True))


def _numbered(requests: list[_Whole]) -> list[_Whole]:
    for index, request in enumerate(requests):
        for name in ("request_id", "idempotency_key"):
            if given := getattr(request.options, name):
                setattr(request.options, name, f"{given}-{index}")
    return requests


def to_model_class(params: SamplingParams | None, options: CallOptions) -> type[ModelClass] | None:
    """The class to read the output with, if the structured output is one."""
    given = params.structured_output if params else None
    return model_class(options.get("structured_output", given))


def _to_options(params: SamplingParams | None, options: CallOptions) -> pb.GenerationOptions:
    """Keywords override `params`. Raises TypeError for an unknown keyword, as any function does."""
    sampling: dict[str, Any] = {**options}
    for name in ("timeout_s", "metadata"):  # used by the channel
        sampling.pop(name, None)
    message = pb.GenerationOptions()
    if (beams := sampling.pop("beam_search", None)) is not None:
        message.beam_search.CopyFrom(to_beam_search(beams))
    set_fields(message, {name: sampling.pop(name, None) for name in _CALL_FIELDS})
    params = replace(params or SamplingParams(), **sampling)
    set_fields(message, {name: getattr(params, name) for name in _TEXT_FIELDS})
    set_fields(message.sampling, {name: getattr(params, name) for name in _TOKEN_FIELDS})
    extend(message, "stop", [params.stop] if isinstance(params.stop, str) else params.stop)
    extend(message, "bad_words", params.bad_words)
    extend(message.sampling, "stop_token_ids", params.stop_token_ids)
    extend(message.sampling, "allowed_token_ids", params.allowed_token_ids)
    extend(message.sampling, "logprob_token_ids", params.logprob_token_ids)
    for token_id, bias in (params.logit_bias or {}).items():
        entry = message.sampling.logit_bias.add()
        set_fields(entry, {"token_id": token_id, "bias": bias}, name="logit_bias")
    if params.structured_output is not None:
        message.structured_output.CopyFrom(to_structured_output(params.structured_output))
    return message


def _check_stream(options: CallOptions) -> None:
    if options.get("idempotency_key"):
        raise InvalidArgument("idempotency_key: is for calls without a stream, which resumes")
    if options.get("beam_search") is not None:
        raise InvalidArgument("beam_search: is for calls without a stream, its outputs come last")


def _of_any_call(options: ChatCallOptions) -> CallOptions:
    """The options that are not about the conversation."""
    everything: dict[str, object] = {**options}
    chat = ChatOptions.__annotations__
    return cast(CallOptions, {k: v for k, v in everything.items() if k not in chat})


def _to_prompt(prompt: Prompt) -> pb.Prompt:
    """A text, or token ids unchanged."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    token_ids = pb.TokenIds()
    extend(token_ids, "ids", prompt, name="prompt")
    return pb.Prompt(token_ids=token_ids)


def to_tokenize(
    text: Messages, model: str, add_special_tokens: bool | None, options: ChatOptions
) -> pb.TokenizeRequest:
    """A string is tokenized as text, anything else as a conversation."""
    if unknown := sorted(options.keys() - ChatOptions.__annotations__.keys()):
        raise TypeError(f"tokenize() got an unexpected keyword argument {unknown[0]!r}")
    request, chat = pb.TokenizeRequest(model=model), to_chat_options(options)
    if isinstance(text, str):
        if chat is not None:
            raise InvalidArgument(f"{next(iter(options))}: is for a conversation, not for a text")
        request.text = text
    else:
        conversation = pb.Conversation(messages=to_messages(text), chat=chat)
        request.conversation.CopyFrom(conversation)
    set_fields(request, {"add_special_tokens": add_special_tokens})
    return request


def to_detokenize(
    token_ids: Sequence[int], model: str, skip_special_tokens: bool | None
) -> pb.DetokenizeRequest:
    """The request of detokenize."""
    request = pb.DetokenizeRequest(model=model)
    extend(request, "token_ids", token_ids)
    set_fields(request, {"skip_special_tokens": skip_special_tokens})
    return request


def to_embed(
    inputs: str | Sequence[Prompt],
    pooling: Pooling,
    normalize: bool,
    model: str,
    request_id: str,
) -> embedding_pb2.EmbedRequest:
    """The request of embed."""
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
