"""Latencies and rates of a served workload, and whether they meet an objective."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import FinishReason
from simulator.capacity.virtual_server import DraftCounts, RequestOutcome, ServedWorkload

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds at the usual percentiles; infinite where requests were never served."""

    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class DraftSummary:
    """The fate of drafts; None where nothing was drafted."""

    num_verifications: int  # of a row in a step
    num_drafted_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None  # of the drafted tokens
    tokens_per_verification: float | None  # accepted drafts, and the token after them


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """Statistics of a served workload."""

    num_requests: int
    num_completed: int
    num_refused: int
    num_expired: int
    duration_s: float
    requests_per_s: float  # completed
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # cached ones included
    ttft: Latency  # from arrival to first token
    tpot: Latency  # time between tokens, mean per request
    e2e: Latency  # from arrival to last token
    cached_share: float  # of the prompt tokens of admitted requests
    num_preemptions: int
    num_steps: int
    mean_batch: float
    busy_share: float  # of the time until the last end
    peak_blocks: float
    max_waiting: int
    drafts: DraftSummary | None  # None: there is no speculation


def summarize(served: ServedWorkload) -> WorkloadSummary:
    """The statistics of a workload that has ended."""
    outcomes = served.outcomes
    completed = [o for o in outcomes if o.reason is FinishReason.LENGTH]
    duration_s = max(served.duration_s, 1e-9)
    looked_up = sum(o.arrival.prompt_tokens for o in outcomes if o.num_tokens)
    return WorkloadSummary(
        num_requests=len(outcomes),
        num_completed=len(completed),
        num_refused=sum(o.reason is None for o in outcomes),
        num_expired=sum(o.reason is FinishReason.EXPIRED for o in outcomes),
        duration_s=served.duration_s,
        requests_per_s=len(completed) / duration_s,
        output_tokens_per_s=sum(o.num_tokens for o in outcomes) / duration_s,
        prompt_tokens_per_s=sum(o.arrival.prompt_tokens for o in completed) / duration_s,
        ttft=_latency(_ttft_s(o) for o in outcomes),
        tpot=_latency(t for o in outcomes for t in _tpot_s(o)),
        e2e=_latency(_e2e_s(o) for o in outcomes),
        cached_share=sum(o.num_cached_tokens for o in outcomes) / max(looked_up, 1),
        num_preemptions=served.num_preemptions,
        num_steps=served.num_steps,
        mean_batch=served.mean_batch,
        busy_share=served.busy_s / duration_s,
        peak_blocks=served.peak_blocks,
        max_waiting=served.max_waiting,
        drafts=None if served.drafts is None else _draft_summary(served.drafts),
    )


def _draft_summary(counts: DraftCounts) -> DraftSummary:
    num_drafted, num_verified = counts.num_drafted_tokens, counts.num_verifications
    num_accepted = counts.num_accepted_tokens
    return DraftSummary(
        num_verifications=num_verified,
        num_drafted_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        acceptance_rate=num_accepted / num_drafted if num_drafted else None,
        tokens_per_verification=1 + num_accepted / num_verified if num_verified else None,
    )


def _ttft_s(outcome: RequestOutcome) -> float:
    return outcome.first_token_s - outcome.arrival.arrival_s if outcome.num_tokens else math.inf


def _tpot_s(outcome: RequestOutcome) -> Iterator[float]:
    if outcome.num_tokens > 1:
        yield (outcome.last_token_s - outcome.first_token_s) / (outcome.num_tokens - 1)


def _e2e_s(outcome: RequestOutcome) -> float:
    if outcome.reason is not FinishReason.LENGTH:
        return math.inf
    return outcome.last_token_s - outcome.arrival.arrival_s


def _latency(seconds: Iterable[float]) -> Latency:
    values = np.array(list(seconds))
    if not len(values):
        return Latency(0.0, 0.0, 0.0)
    # The smallest value that this share does not exceed: no interpolation with an infinite one.
    return Latency(*np.percentile(values, PERCENTILES, method="inverted_cdf").tolist())


@dataclass(frozen=True, slots=True)
class CapacityObjective:
    """Limits on the 99th percentile of latencies, in seconds; None: no limit."""

    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    e2e_p99_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, must be positive")

    @property
    def is_empty(self) -> bool:
        """True if there is no limit."""
        return self.ttft_p99_s is self.tpot_p99_s is self.e2e_p99_s is None

    def excess(self, summary: WorkloadSummary) -> str | None:
        """The first limit that was exceeded, as text; None when none was."""
        for name, limit_s, latency in (
            ("time to first token", self.ttft_p99_s, summary.ttft),
            ("time per output token", self.tpot_p99_s, summary.tpot),
            ("end to end", self.e2e_p99_s, summary.e2e),
        ):
            if limit_s is not None and latency.p99_s > limit_s:
                return f"p99 {name} is {latency.p99_s:.3f} s, more than {limit_s:g} s"
        return None
