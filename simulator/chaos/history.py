"""Checks what clients received: each request ends once, with exactly the expected tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import Finished, FinishReason, Request
from scheduler_svc.sampling import Sampling
from simulator.workers.slots import token_at


@dataclass(slots=True)
class ClientHistory:
    """One request as its client saw it; times are of the virtual clock, in seconds."""

    request: Request
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    ends: list[tuple[float, Finished]] = field(default_factory=list)
    num_tokens_after_end: int = 0
    aborted_s: float | None = None  # when the client aborted; it receives nothing after

    @property
    def is_over(self) -> bool:
        """True if its client awaits nothing more."""
        return bool(self.ends) or self.aborted_s is not None


@dataclass(frozen=True, slots=True)
class HistoryRules:
    """Deviations that the scenario allows."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    deadline_slack_s: float  # how late an expiry may be noticed
    may_give_up: bool  # enough workers were lost to blame a request
    may_outgrow: bool  # a worker came back with fewer blocks
    num_bad_rows: int  # reported by workers


def expected(request: Request, rules: HistoryRules) -> tuple[list[int], FinishReason]:
    """The tokens of an undisturbed request, and why it ends."""
    num_prompt = len(request.prompt_token_ids)
    limit = rules.max_model_len - num_prompt
    if request.max_tokens is not None:
        limit = min(limit, request.max_tokens)
    assert isinstance(request.sampling, Sampling)
    seeds = np.full(limit, request.sampling.seed, dtype=np.uint64)
    positions = np.arange(num_prompt, num_prompt + limit)
    tokens = token_at(seeds, positions, rules.vocab_size).tolist()
    stops = {*request.stop_token_ids, *(() if request.ignore_eos else rules.eos_token_ids)}
    for count, token in enumerate(tokens, 1):
        if token in stops and count >= request.min_tokens:
            return tokens[:count], FinishReason.STOP
    return tokens, FinishReason.LENGTH


def judge(histories: list[ClientHistory], rules: HistoryRules) -> list[str]:
    """All problems found, as text; empty when there are none."""
    problems = [
        f"{history.request.request_id}: {problem}"
        for history in histories
        for problem in _problems(history, rules)
    ]
    num_errors = sum(
        finished.reason is FinishReason.ERROR and "not finite" in finished.message
        for history in histories
        for _, finished in history.ends
    )
    if num_errors > rules.num_bad_rows:
        problems.append(f"{num_errors} failed for bad rows, {rules.num_bad_rows} were reported")
    return problems


def _problems(history: ClientHistory, rules: HistoryRules) -> Iterator[str]:
    words, reason = expected(history.request, rules)
    got = history.tokens
    if got != words[: len(got)]:
        yield _difference(got, words)
    if history.num_tokens_after_end:
        yield f"{history.num_tokens_after_end} tokens after the end"
    if not history.is_over:
        yield f"never ended, after {len(got)} of {len(words)} tokens"
    if len(history.ends) > 1:
        yield f"ended {len(history.ends)} times"
    if history.aborted_s is not None and any(at > history.aborted_s for at, _ in history.ends):
        yield "an end was delivered after its client had given up"
    for ended_s, finished in history.ends[:1]:
        yield from _end_problems(history, ended_s, finished, words, reason, rules)


def _difference(got: list[int], words: list[int]) -> str:
    for position, (said, due) in enumerate(zip(got, words, strict=False)):
        if said != due:
            is_repeated = position and said == words[position - 1]
            is_ahead = said in words[position + 1 : position + 3]
            what = "repeated" if is_repeated else "a token is lost" if is_ahead else "wrong"
            return f"token {position} is {said}, not {due}: {what}"
    return f"{len(got)} tokens, {len(words)} were due"


def _end_problems(
    history: ClientHistory,
    ended_s: float,
    finished: Finished,
    words: list[int],
    reason: FinishReason,
    rules: HistoryRules,
) -> Iterator[str]:
    request, got = history.request, history.tokens
    if finished.num_prompt_tokens != len(request.prompt_token_ids):
        yield f"usage says {finished.num_prompt_tokens} prompt tokens"
    if finished.num_output_tokens != len(got):
        yield f"usage says {finished.num_output_tokens} output tokens, {len(got)} came"
    if not 0 <= finished.num_cached_tokens < len(request.prompt_token_ids):
        yield f"usage says {finished.num_cached_tokens} cached tokens"
    match finished.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            if (got, finished.reason) != (words, reason):
                yield f"ended by {finished.reason.value} after {len(got)} of {len(words)} tokens"
        case FinishReason.EXPIRED:
            yield from _expiry_problems(request, ended_s, rules)
        case FinishReason.ERROR:
            if not _has_cause(finished.message, rules):
                yield f"failed without cause: {finished.message}"
        case FinishReason.ABORT:
            yield "aborted without a cause"


def _has_cause(message: str, rules: HistoryRules) -> bool:
    if "not finite" in message:
        return rules.num_bad_rows > 0
    if "too small for it" in message:
        return rules.may_outgrow
    return rules.may_give_up


def _expiry_problems(request: Request, ended_s: float, rules: HistoryRules) -> Iterator[str]:
    deadline_s = request.deadline_s
    if deadline_s is None:
        yield "expired without a deadline"
    elif not deadline_s <= ended_s <= deadline_s + rules.deadline_slack_s:
        yield f"expired {ended_s - deadline_s:.3f} s after its deadline"
