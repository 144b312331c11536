"""Requests and results of generation, independent of any wire format."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from gateway.chat.conversation import Conversation
from gateway.chat.parts import Content, Part, Reply, reply_of
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.request.beam_options import BeamOptions
from gateway.request.client_session import ClientSession
from gateway.structure.calls import AnyStructure
from gateway.structure.thinking import ThoughtFirst
from gateway.text.logprobs import OutputTokenLogprobs, num_values
from gateway.text.prompt_outputs import PromptOutputs
from wire.adapters import AdapterSource
from wire.requests.numbers import INT32_MAX, LONGEST_TIMEOUT_S, UINT32_MAX, UINT64_MAX
from wire.sampling import NUMBERS, SMALLEST_FLOAT
from wire.tracing.context import TraceContext

MAX_LOGPROBS = 20
MOST_DIGITS = 40  # of a refused number that are repeated


class FinishReason(Enum):
    """Why an output ended normally; failures raise RequestError."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for sampling tokens and for stopping; None leaves the default to the scheduler."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    num_top_logprobs: int | None = None  # None: no log probabilities
    logprob_token_ids: tuple[int, ...] = ()  # reported in place of the likeliest; empty: those
    num_prompt_logprobs: int | None = None  # of the prompt's tokens
    skip_speculation: bool | None = None  # changes when tokens come, never which
    grammar: str = ""  # set by the pipeline from the request's structure

    def check(self, vocab_size: int, *, fewest_tokens: int = 1) -> None:
        """Raises RequestError naming the first field that is out of range."""
        for name, number in NUMBERS.items():
            value: float | None = getattr(self, name)
            check_range(name, value, number.low, number.high, open_below=number.is_open_below)
        check_range("seed", self.seed, 0, UINT64_MAX)
        check_range("max_tokens", self.max_tokens, fewest_tokens, UINT32_MAX)
        check_range("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise invalid("min_tokens", f"{self.min_tokens} exceeds max_tokens {self.max_tokens}")
        count = len(self.stop_token_ids)
        limits.check_count("stop_token_ids", count, limits.MAX_STOP_TOKEN_IDS)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_range("logprobs", self.num_top_logprobs, 0, MAX_LOGPROBS)
        check_range("prompt_logprobs", self.num_prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_named_tokens(vocab_size)
        self._check_lists(vocab_size)

    def _check_named_tokens(self, vocab_size: int) -> None:
        name, count = "logprob_token_ids", len(self.logprob_token_ids)
        limits.check_count(name, count, limits.MAX_LOGPROB_TOKEN_IDS)
        check_token_ids(name, self.logprob_token_ids, vocab_size)
        if count and self.num_top_logprobs is None:
            raise invalid(name, "is only allowed with logprobs")
        if count and self.max_tokens == 0:
            raise invalid(name, "asks about the output, and max_tokens is 0")

    def _check_lists(self, vocab_size: int) -> None:
        limits.check_count("logit_bias", len(self.logit_bias), limits.MAX_LOGIT_BIASES)
        biased = tuple(token_id for token_id, _ in self.logit_bias)
        check_token_ids("logit_bias", biased, vocab_size)
        if len(set(biased)) < len(biased):
            raise invalid("logit_bias", "names a token twice")
        for _, bias in self.logit_bias:
            check_range("logit_bias", bias, -100, 100)
        allowed, bad_words = self.allowed_token_ids, self.bad_words_token_ids
        limits.check_count("allowed_token_ids", len(allowed), limits.MAX_ALLOWED_TOKEN_IDS)
        check_token_ids("allowed_token_ids", allowed, vocab_size)
        name = "bad_words_token_ids"
        limits.check_count(name, len(bad_words), limits.MAX_BAD_TOKEN_SEQUENCES)
        for index, word in enumerate(bad_words):
            limits.check_count(f"{name}[{index}]", len(word), limits.MAX_BAD_WORD_TOKENS)
            if not word:
                raise invalid(f"{name}[{index}]", "is empty")
            check_token_ids(f"{name}[{index}]", word, vocab_size)


def check_range(
    name: str, value: float | None, low: float, high: float, *, open_below: bool = False
) -> None:
    """Raises RequestError for a number outside; None is absent and passes."""
    if value is None:
        return
    least = low + SMALLEST_FLOAT if open_below else low
    is_inside = least <= value <= high
    if not is_inside:  # also true for NaN
        bracket = "(" if open_below else "["
        told = str(value)  # JSON has integers of thousands of digits
        told = told if len(told) <= MOST_DIGITS else f"{told[:MOST_DIGITS]}..."
        raise invalid(name, f"{told} is outside {bracket}{low}, {high}]")


def check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises RequestError for ids outside the vocabulary."""
    if not token_ids:
        return
    worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
    if not 0 <= worst < vocab_size:
        raise invalid(name, f"{worst} is outside the vocabulary of {vocab_size} ids")


@dataclass(frozen=True, slots=True)
class Standing:
    """Priority, tenant and timeout of a request, for the scheduler's policy, and its trace."""

    priority: int = 0  # smaller is more urgent
    tenant: str = ""
    timeout_s: float | None = None  # from submission
    is_own_tenant: bool = False  # the tenant is the caller's by its key, and not only named
    trace: TraceContext | None = None  # the span of which the next one is a child

    def __post_init__(self) -> None:
        check_range("priority", self.priority, -INT32_MAX - 1, INT32_MAX)
        check_range("timeout_s", self.timeout_s, -LONGEST_TIMEOUT_S, LONGEST_TIMEOUT_S)
        limits.check_bytes("tenant", self.tenant, limits.MAX_TENANT_BYTES)

    def scoped(self, request_id: str) -> str:
        """The id for the scheduler: tenants with keys see and block no ids of each other."""
        return f"{self.tenant}/{request_id}" if self.is_own_tenant else request_id

    def scoped_salt(self, cache_salt: str) -> str:
        """The salt for the scheduler: tenants with keys share no cached prefixes.

        What a tenant can choose is hashed together with its name, so no choice of it leads to the
        prefixes of another.
        """
        if not self.is_own_tenant:
            return cache_salt
        return hashlib.sha256(f"{self.tenant}/{cache_salt}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """The requests that may share the KV of the prompt."""

    cache_salt: str = ""  # shared only within one salt
    skip_prefix_cache: bool = False  # shared with none
    fork_group: str = ""  # shared within a group, all of one prompt
    session: ClientSession | None = None  # None: its client says nothing of one

    def __post_init__(self) -> None:
        limits.check_bytes("cache_salt", self.cache_salt, limits.MAX_CACHE_SALT_BYTES)


# Text is tokenized, ids are used unchanged, a conversation is rendered by the chat template.
Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, slots=True)
class Truncation:
    """The way in which a prompt that is too long is shortened."""

    num_tokens: int | None  # that are left; None: as many as leave room for one token of output
    keeps_start: bool = False  # else the end


class PromptPooling(Enum):
    """The hidden states that represent a whole prompt."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one output, or for those of one beam search."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None  # to the prompt; None: to text, not to a conversation
    model: str | None = None
    bad_words: tuple[str, ...] = ()
    standing: Standing = Standing()
    reuse: PrefixReuse = PrefixReuse()
    structure: AnyStructure | ThoughtFirst | None = None  # None: any text
    resume_token_ids: tuple[int, ...] = ()  # output that the client has already
    echo: bool = False  # the prompt precedes the output
    truncation: Truncation | None = None  # None: a prompt that is too long is refused
    returns_prompt_ids: bool = False
    counts_usage: bool = False  # with every delta
    pooling: PromptPooling | None = None  # return hidden states instead of an output
    num_deaths: int = 0  # of gateways, in a row, while it ran there
    beams: BeamOptions | None = None  # None: tokens are sampled
    is_accepted: bool = False  # with its call: a gateway that drains computes it all the same

    def __post_init__(self) -> None:
        if self.structure is not None and self.sampling.ignore_eos:
            problem = "cannot go with a structured output, which an end-of-sequence token ends"
            raise invalid("ignore_eos", problem)
        scoped_id = self.standing.scoped(self.request_id)
        limits.check_bytes("request_id", scoped_id, limits.MAX_REQUEST_ID_BYTES)
        limits.check_count("stop", len(self.stop), limits.MAX_STOP_STRINGS)
        for index, text in enumerate(self.stop):
            limits.check_bytes(f"stop[{index}]", text, limits.MAX_STOP_STRING_BYTES)
            if not text:
                raise invalid(f"stop[{index}]", "is empty")
        limits.check_count("bad_words", len(self.bad_words), limits.MAX_BAD_WORDS)
        for index, word in enumerate(self.bad_words):
            limits.check_bytes(f"bad_words[{index}]", word, limits.MAX_BAD_WORD_BYTES)
            if not word.strip():
                raise invalid(f"bad_words[{index}]", "is empty")

    def after(self, waited_s: float) -> "GenerationRequest":
        """The same, as part of an accepted call, once it has waited for its submission."""
        standing = self.standing
        if standing.timeout_s is not None:
            standing = replace(standing, timeout_s=standing.timeout_s - waited_s)
        return replace(self, standing=standing, is_accepted=True)

    def of(self, standing: Standing, session: ClientSession | None) -> "GenerationRequest":
        """The same, of this caller and session."""
        return replace(self, standing=standing, reuse=replace(self.reuse, session=session))

    def check(self, vocab_size: int) -> None:
        """Raises RequestError naming the first field that is out of range."""
        asks_about_prompt = self.echo or self.sampling.num_prompt_logprobs is not None
        self.sampling.check(vocab_size, fewest_tokens=0 if asks_about_prompt else 1)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  # of the completion


@dataclass(frozen=True, slots=True)
class OutputTimings:
    """The parts of one output's time, in seconds; None for parts that it never reached."""

    total_s: float  # from the request's arrival, as is the first token's
    queue_s: float | None = None  # from submission until the scheduler let it run
    first_token_s: float | None = None
    per_token_s: float | None = None  # mean, from a token to the next


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an output. At most one of the two stop fields is set."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None
    timings: OutputTimings | None = None  # None: another process saw the beginning
    cumulative_logprob: float | None = None  # if log probabilities of all its tokens are known


class OutputDelta(NamedTuple):  # one per message: a frozen dataclass takes three times as long
    """A piece of output; the last one has `finish`."""

    text: str
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: tuple[OutputTokenLogprobs, ...] = ()  # one per token, if requested
    parts: tuple[Part, ...] | None = None  # of a chat; None: the text is all content
    prompt: PromptOutputs | None = None  # with the first piece, if requested
    usage: Usage | None = None  # so far, if requested
    choice: int = 0  # which of the outputs of its call


@dataclass(frozen=True, slots=True)
class WholeOutput:
    """A whole output."""

    text: str
    token_ids: list[int]
    finish: Finish
    logprobs: tuple[OutputTokenLogprobs, ...] = ()  # one per token, if requested
    parts: tuple[Part, ...] | None = None  # of a chat; None: the text is all content
    prompt: PromptOutputs | None = None  # if requested

    @property
    def num_values(self) -> int:
        """About how many numbers and texts an answer tells of it."""
        of_prompt = 0 if self.prompt is None else self.prompt.num_values
        return of_prompt + len(self.token_ids) + num_values(self.logprobs)

    @property
    def reply(self) -> Reply:
        """The output as a chat answer."""
        return reply_of(parts_of(self))


def parts_of(output: OutputDelta | WholeOutput) -> tuple[Part, ...]:
    """The parts of an output; without a parser its text is all content, if there is any."""
    if output.parts is not None:
        return output.parts
    return (Content(output.text),) if output.text else ()


def completion_of(deltas: Sequence[OutputDelta]) -> WholeOutput:
    """The whole output from the deltas of a finished stream."""
    finish = deltas[-1].finish
    assert finish is not None, "an output ended without a finish"
    parsed = [delta.parts for delta in deltas if delta.parts is not None]
    return WholeOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish=finish,
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
        parts=tuple(part for parts in parsed for part in parts) if parsed else None,
        prompt=deltas[0].prompt,
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the scheduler's worker serves."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    config_sha256: str
    tokenizer_sha256: str
    dtype: str
    llguidance_version: str = ""  # empty: not reported by the worker
    quantization: str = ""  # the same
    takes_pictures: bool = False
    parent: str = ""  # of an adapter: the name of the model that it is for; empty: this is a model
    adapter: AdapterSource | None = None  # that requests of this name compute with

    def of_adapter(self, adapter: AdapterSource) -> "ServedModel":
        """The adapter, as requests see it: a model of its own name."""
        return replace(self, name=adapter.name, parent=self.name, adapter=adapter)
