"""Checks sampling parameters and fills in every default.

All parameters that the worker receives are checked here and nowhere else in this service; the core
checks those that decide when a request ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pagewire.v1.types_pb2 import POOLING_UNSPECIFIED, Pooling, SamplingParams
from wire.adapters import AdapterSource
from wire.sampling import GREEDY_TEMPERATURE, NUMBERS

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 256
MAX_LOGPROBS = 128  # more than gateways grant their callers: they search beams with them
MAX_PROMPT_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 1 << 20


class BadSampling(ValueError):
    """Raised for a parameter out of range; the message names it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one request, complete."""

    temperature: float  # 0: greedy
    top_p: float  # 1: off
    top_k: int  # 0: off
    min_p: float  # 0: off
    seed: int
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    num_top_logprobs: int | None = None  # None: no log probabilities
    logprob_token_ids: tuple[int, ...] = ()  # reported in place of the likeliest; empty: those
    grammar: str = ""  # empty: none; parsed by gateways and workers only
    num_prompt_logprobs: int | None = None  # of the prompt's tokens
    pooling: Pooling = POOLING_UNSPECIFIED  # hidden states of the prompt to return
    adapter: AdapterSource | None = None  # with which it computes; None: the model alone


def resolve(params: SamplingParams, drawn_seed: int, vocab_size: int) -> Sampling:
    """Returns checked parameters with defaults; `drawn_seed` is used when no seed was given.

    Raises BadSampling, naming the parameter.
    """
    _check_ranges(params)
    _check_lists(params, vocab_size)
    temperature = params.temperature if params.HasField("temperature") else 1.0
    is_greedy = temperature < GREEDY_TEMPERATURE
    top_p = params.top_p if params.HasField("top_p") else 1.0
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    return Sampling(
        temperature=0.0 if is_greedy else temperature,
        top_p=1.0 if is_greedy else top_p,
        top_k=0 if is_greedy else max(params.top_k, 0),
        min_p=0.0 if is_greedy else params.min_p,
        seed=params.seed if params.HasField("seed") else drawn_seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in params.logit_bias),
        allowed_token_ids=tuple(dict.fromkeys(params.allowed_token_ids)),
        bad_words_token_ids=tuple(tuple(word.token_ids) for word in params.bad_words_token_ids),
        num_top_logprobs=params.logprobs if params.HasField("logprobs") else None,
        logprob_token_ids=tuple(params.logprob_token_ids),
        grammar=params.grammar,
        num_prompt_logprobs=(
            params.prompt_logprobs if params.HasField("prompt_logprobs") else None
        ),
    )


def _check_ranges(params: SamplingParams) -> None:
    """Checks single numbers; NaN is in no range. Raises BadSampling."""
    for name, number in NUMBERS.items():
        value = getattr(params, name)
        if params.HasField(name) and not number.holds(value):
            raise BadSampling(f"{name} is {value}, must be {number.range_words}")
    for name, most in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_PROMPT_LOGPROBS)):
        if (count := getattr(params, name)) > most:
            raise BadSampling(f"{name} is {count}, must be at most {most}")


def _check_lists(params: SamplingParams, vocab_size: int) -> None:
    _check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    _check_count("allowed_token_ids", len(params.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
    _check_count("bad_words_token_ids", len(params.bad_words_token_ids), MAX_BAD_WORDS)
    _check_count("logprob_token_ids", len(params.logprob_token_ids), MAX_LOGPROBS)
    if params.logprob_token_ids and not params.HasField("logprobs"):
        raise BadSampling("logprob_token_ids needs logprobs, which is absent")
    if (num_bytes := len(params.grammar.encode())) > MAX_GRAMMAR_BYTES:
        raise BadSampling(f"grammar has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES}")
    if params.grammar and params.ignore_eos:
        raise BadSampling("ignore_eos cannot go with a grammar, which an end-of-sequence ends")
    biased = [entry.token_id for entry in params.logit_bias]
    if len(set(biased)) < len(biased):
        raise BadSampling("logit_bias names a token twice")
    for entry in params.logit_bias:
        if not -100 <= entry.bias <= 100:
            raise BadSampling(f"logit_bias has {entry.bias}, must be from -100 to 100")
    for word in params.bad_words_token_ids:
        if not 1 <= len(word.token_ids) <= MAX_BAD_WORD_TOKENS:
            raise BadSampling(
                f"bad_words_token_ids has a sequence of {len(word.token_ids)} tokens, must be "
                f"from 1 to {MAX_BAD_WORD_TOKENS}"
            )
        _check_vocabulary("bad_words_token_ids", word.token_ids, vocab_size)
    _check_vocabulary("logit_bias", biased, vocab_size)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_vocabulary("logprob_token_ids", params.logprob_token_ids, vocab_size)
    banned = {w.token_ids[0] for w in params.bad_words_token_ids if len(w.token_ids) == 1}
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise BadSampling("allowed_token_ids has only tokens that bad words forbid")


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise BadSampling(f"{name} has {count} entries, at most {limit}")


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise BadSampling(f"{name} has id {largest}, outside 0..{vocab_size - 1}")
