"""Arguments and results of the SDK: plain frozen values, without protobuf and gRPC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from typing import Any, Literal, TypedDict

from pagewire._beams import BeamSearch
from pagewire._chat import ChatOptions, Message, ToolCall, ToolCallDelta
from pagewire._structure import StructuredOutput


class FinishReason(StrEnum):
    """Why an output ended; equal to its string, so that `reason == "stop"` holds."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length limit
    ABORT = "abort"  # cancelled
    ERROR = "error"  # failed


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    @property
    def total_tokens(self) -> int:
        """Number of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


Prompt = str | Sequence[int]
Pooling = Literal["last", "mean"]  # hidden states that represent a text


@dataclass(frozen=True, slots=True)
class SamplingParams:
    r"""Rules for sampling tokens and for stopping. None leaves the choice to the server.

    >>> SamplingParams(temperature=0, max_tokens=32, stop="\n").max_tokens
    32
    """

    temperature: float | None = None  # 0 to 2; 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None  # -2 to 2, over the output
    frequency_penalty: float | None = None  # -2 to 2, over the output
    repetition_penalty: float | None = None  # above 0, over prompt and output
    logit_bias: Mapping[int, float] | None = None  # token ids and biases from -100 to 100
    allowed_token_ids: Sequence[int] = ()  # empty: all
    bad_words: Sequence[str] = ()
    logprobs: int | None = None  # alternatives per token, 0 to 20; None: no log probabilities
    structured_output: StructuredOutput | None = None  # form, or model class; None: any text
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logprob_token_ids: Sequence[int] = ()  # alternatives to report for the likeliest, at most 128
    skip_speculation: bool | None = None  # draft nothing: changes when tokens come, never which


BatchParams = SamplingParams | Sequence[SamplingParams] | None  # of all requests, or of each


class CallOptions(TypedDict, total=False):
    """Keyword arguments of generating calls: these, and the fields of SamplingParams.

    `timeout_s` is the time limit of the call in seconds (`math.inf`: none); `model` is needed only
    where several are served; `request_id` appears in the server's logs. `priority` (smaller is more
    urgent) and `tenant` are used by the scheduling policy. Prompts share the KV of a common prefix
    only with prompts of the same `cache_salt`, and with none if `skip_prefix_cache`. `n` is the
    number of outputs, 1 to 16; with a `beam_search` the likeliest ones, which no stream can have.
    `metadata` travels with the call, for tracing and proxies. A call with the `idempotency_key` of
    an earlier one gets its answer; the client makes one for each call, so yours is for calls that
    your own program sends again.
    """

    model: str
    request_id: str
    timeout_s: float | None
    priority: int
    tenant: str
    cache_salt: str
    skip_prefix_cache: bool
    n: int
    beam_search: BeamSearch | None
    metadata: Mapping[str, str] | None
    idempotency_key: str

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logprobs: int | None
    structured_output: StructuredOutput | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int]
    skip_speculation: bool | None


class ChatCallOptions(CallOptions, ChatOptions, total=False):
    """Keyword arguments of calls that answer a conversation."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token before temperature, penalties and filters."""

    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # likeliest token ids and their log probabilities


@dataclass(frozen=True, slots=True)
class Timings:
    """The parts of one output's time, in seconds; None where a part is not known.

    The gateway counts from the arrival of the request. The client counts from the start of the
    call, with the network and every retry; it measures where the gateway does not, as for a stream
    that was resumed.
    """

    measured_by: Literal["gateway", "client"]
    total_s: float
    queue_s: float | None = None  # until the scheduler let it run; the gateway alone knows
    first_token_s: float | None = None
    per_token_s: float | None = None  # mean, from a token to the next


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output."""

    text: str  # of a chat, the content only
    token_ids: tuple[int, ...]  # including a final stop token
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    model: str
    stop_reason: str | int | None = None  # the stop string or stop token that ended it, if any
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    prompt_token_ids: tuple[int, ...] = ()  # with prompt_logprobs
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # if requested; None for the first token
    reasoning: str = ""  # the model's reasoning before the answer
    tool_calls: tuple[ToolCall, ...] = ()  # requested by the model
    more: tuple["Completion", ...] = ()  # the other outputs, if n is above 1
    parsed: Any = None  # object of the model class given as structured_output; None: cut off
    timings: Timings | None = field(default=None, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of the tokens; None unless logprobs were requested."""
        return sum(token.logprob for token in self.logprobs) if self.logprobs else None

    @property
    def outputs(self) -> tuple["Completion", ...]:
        """All outputs of the request: this one, then `more`."""
        return (self, *self.more)

    @property
    def message(self) -> Message:
        """The answer as a turn to append to the conversation."""
        return Message(
            "assistant", self.text, reasoning=self.reasoning or None, tool_calls=self.tool_calls
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of output; the last one of each output has finish_reason and usage."""

    text: str  # may be empty: some tokens do not complete a character
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    prompt_token_ids: tuple[int, ...] = ()  # with prompt_logprobs, in the first piece
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # if requested; None for the first token
    reasoning: str = ""  # a piece of the model's reasoning
    tool_calls: tuple[ToolCallDelta, ...] = ()  # pieces of tool calls, in order
    index: int = 0  # of this output among the n


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector per input, in order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage  # of all inputs together
    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TLS:
    """Encryption of the connection, from PEM files.

    Without `ca_cert`, gRPC's own root certificates are trusted. `client_cert` and `client_key`
    together authenticate the client to servers that require it.
    """

    ca_cert: str | PathLike[str] | None = None
    client_cert: str | PathLike[str] | None = None
    client_key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.client_cert is None) != (self.client_key is None):
            raise ValueError("client_cert and client_key belong together: give both or neither")
