"""What callers of the SDK pass in and get back: plain frozen values, no protobuf, no gRPC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os import PathLike
from typing import Literal, TypedDict

from pagewire._chat import ChatOptions, Message, ToolCall, ToolCallDelta
from pagewire._structure import StructuredOutput


class FinishReason(StrEnum):
    """Why an output ended; equal to its string, so `reason == "stop"` holds."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length limit
    ABORT = "abort"  # cancelled
    ERROR = "error"  # failed


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


Prompt = str | Sequence[int]
Pooling = Literal["last", "mean"]  # hidden states that stand for a text


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. None leaves the choice to the server.

    >>> SamplingParams(temperature=0, max_tokens=32, stop="\\n").max_tokens
    32
    """

    temperature: float | None = None  # 0 to 2; 0 is greedy
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
    logprobs: int | None = None  # likeliest tokens to report per token, 0 to 20; None: nothing
    structured_output: StructuredOutput | None = None  # what it must look like; None: anything
    prompt_logprobs: int | None = None  # the same of the prompt's tokens


class CallOptions(TypedDict, total=False):
    """Keyword arguments of every generating call: its own, and the fields of SamplingParams.

    `timeout_s` bounds the call, `math.inf` is no bound; `model` is needed only where several are
    served; `request_id` is for the server's logs. `priority` (smaller is more urgent) and `tenant`
    say how the request stands among others. Prompts share what was computed of a common beginning
    with those of the same `cache_salt` alone, with none if `skip_prefix_cache`. `n` is the number
    of outputs, 1 to 16.
    """

    model: str
    request_id: str
    timeout_s: float | None
    priority: int
    tenant: str
    cache_salt: str
    skip_prefix_cache: bool
    n: int

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


class ChatCallOptions(CallOptions, ChatOptions, total=False):
    """Keyword arguments of every call that answers a conversation."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was to the model itself, before temperature, penalties and filters."""

    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # likeliest token ids and their log probabilities


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output."""

    text: str  # of a chat, the content alone
    token_ids: tuple[int, ...]  # the one that ended the output included
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    model: str
    stop_reason: str | int | None = None  # stop string or stop token that ended it, if one did
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    prompt_token_ids: tuple[int, ...] = ()  # where prompt_logprobs are
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # None for the first, if asked for
    reasoning: str = ""  # what the model thought before it answered
    tool_calls: tuple[ToolCall, ...] = ()  # that it asks for
    more: tuple["Completion", ...] = ()  # the other outputs, where n is above 1

    @property
    def message(self) -> Message:
        """The answer as a turn of the conversation, which the next turns go behind."""
        return Message(
            "assistant", self.text, reasoning=self.reasoning or None, tool_calls=self.tool_calls
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of output; the last one of each output has a finish_reason and the usage."""

    text: str  # may be empty: some tokens do not complete a character
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    prompt_token_ids: tuple[int, ...] = ()  # where prompt_logprobs are: in the first piece
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # None for the first, if asked for
    reasoning: str = ""  # more of what the model thinks before it answers
    tool_calls: tuple[ToolCallDelta, ...] = ()  # pieces of them, in order
    index: int = 0  # of the n outputs, the one that this belongs to


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Inputs as vectors, in order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage  # of all inputs
    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model the server offers."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TLS:
    """Encryption of the connection, from PEM files.

    Without `ca_cert` the roots that come with gRPC are trusted. `client_cert` and `client_key`
    together prove who the client is, where the server asks for that.
    """

    ca_cert: str | PathLike[str] | None = None
    client_cert: str | PathLike[str] | None = None
    client_key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.client_cert is None) != (self.client_key is None):
            raise ValueError("client_cert and client_key belong together: give both or neither")
