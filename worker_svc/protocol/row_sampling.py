"""Reads the sampling of a row; what is wrong with it concerns that row alone."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from pagewire.v1 import types_pb2, worker_pb2
from worker_svc.protocol.step import BadStep, Limits, Pooling, RowSampling

_POOLINGS = {
    types_pb2.POOLING_UNSPECIFIED: None,
    types_pb2.POOLING_LAST: Pooling.LAST,
    types_pb2.POOLING_MEAN: Pooling.MEAN,
}


def read_sampling(message: worker_pb2.RowSampling, limits: Limits) -> RowSampling:
    """The sampling of a row, or if it is refused one that has the reason and samples greedily.

    Raises BadStep for what decides the shape of the step's answer: whether prompt outputs are due.
    """
    questions = _questions(message, "sampling", limits)
    try:
        return _sampling(message, "sampling", limits, questions)
    except BadStep as error:
        return replace(RowSampling(refusal=str(error)), **questions)


def _sampling(
    message: worker_pb2.RowSampling, name: str, limits: Limits, questions: dict[str, Any]
) -> RowSampling:
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise BadStep(f"{name}.temperature", f"{message.temperature} is not 0 or more")
    if not 0 < message.top_p <= 1:
        raise BadStep(f"{name}.top_p", f"{message.top_p} is not in (0, 1]")
    if not 0 <= message.min_p <= 1:
        raise BadStep(f"{name}.min_p", f"{message.min_p} is not in [0, 1]")
    stop_token_ids = tuple(dict.fromkeys(message.stop_token_ids))
    _check_vocabulary(stop_token_ids, f"{name}.stop_token_ids", limits)
    if len(stop_token_ids) == limits.vocab_size:
        raise BadStep(f"{name}.stop_token_ids", "masks every token of the vocabulary")
    return RowSampling(
        temperature=message.temperature,
        top_p=message.top_p,
        # A top-k of at least the vocabulary size keeps all tokens, as 0 does.
        top_k=message.top_k if message.top_k < limits.vocab_size else 0,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
        stop_token_ids=stop_token_ids,
        **_processors(message, name, limits),
        **questions,
    )


def _processors(message: worker_pb2.RowSampling, name: str, limits: Limits) -> dict[str, Any]:
    """Fields of RowSampling for logits processors and log probabilities."""
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not (math.isfinite(repetition) and repetition > 0):
        raise BadStep(f"{name}.repetition_penalty", f"{repetition} is not above 0")
    for penalty in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(value := getattr(message, penalty)):
            raise BadStep(f"{name}.{penalty}", f"{value} is not finite")
    bias = {entry.token_id: entry.bias for entry in message.logit_bias}
    if len(bias) < len(message.logit_bias):
        raise BadStep(f"{name}.logit_bias", "names a token twice")
    if not all(map(math.isfinite, bias.values())):
        raise BadStep(f"{name}.logit_bias", "has a bias that is not finite")
    allowed = tuple(dict.fromkeys(message.allowed_token_ids))
    bad_words = tuple(tuple(word.token_ids) for word in message.bad_words_token_ids)
    if not all(bad_words):
        raise BadStep(f"{name}.bad_words_token_ids", "has an empty sequence")
    _check_vocabulary(bias, f"{name}.logit_bias", limits)
    _check_vocabulary(allowed, f"{name}.allowed_token_ids", limits)
    _check_vocabulary(chain(*bad_words), f"{name}.bad_words_token_ids", limits)
    _check_vocabulary(message.logprob_token_ids, f"{name}.logprob_token_ids", limits)
    return {
        "presence_penalty": message.presence_penalty,
        "frequency_penalty": message.frequency_penalty,
        "repetition_penalty": repetition,
        "logit_bias": tuple(bias.items()),
        "allowed_token_ids": allowed,
        "bad_words_token_ids": bad_words,
        # The vocabulary has no more tokens to report.
        "num_top_logprobs": min(message.logprobs, limits.vocab_size)
        if message.HasField("logprobs")
        else None,
        "logprob_token_ids": tuple(message.logprob_token_ids),
        "grammar": message.grammar,
    }


def _questions(message: worker_pb2.RowSampling, name: str, limits: Limits) -> dict[str, Any]:
    """Fields of RowSampling for prompt outputs."""
    asks = message.HasField("prompt_logprobs")
    if message.pooling not in _POOLINGS:
        raise BadStep(f"{name}.pooling", f"{message.pooling} is unknown")
    if asks and message.pooling:
        raise BadStep(f"{name}.pooling", "cannot be had together with prompt_logprobs")
    return {
        "num_prompt_logprobs": min(message.prompt_logprobs, limits.vocab_size) if asks else None,
        "pooling": _POOLINGS[message.pooling],
    }


def _check_vocabulary(token_ids: Iterable[int], name: str, limits: Limits) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise BadStep(name, f"{largest} is not below vocab_size {limits.vocab_size}")
