"""Generates load on a server and computes statistics of the arrival times. Prints nothing.

Either a constant number of requests is in flight, or requests are sent at a rate, at random times
like those of independent users; a request's time then starts when it was due.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagewire._aio import AsyncClient
from pagewire._errors import PagewireError
from pagewire._types import Prompt, Usage


class RequestFailed(Exception):
    """Raised when a request has no complete answer; the message says why."""


@dataclass(frozen=True, slots=True)
class StreamArrival:
    """Tokens in one message of a stream."""

    num_tokens: int
    usage: Usage | None = None


# (prompt, number of tokens, model) to a stream of the answer.
Ask = Callable[[Prompt, int, str], AsyncIterator[StreamArrival]]


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The load to generate."""

    concurrency: int | None  # None: no limit
    output_len: int
    model: str = ""
    rate_per_s: float | None = None  # None: limited by the concurrency alone
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency limits of a good answer; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


ANYTHING = Objective()


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one request, in seconds on one clock, or the reason why it failed."""

    start_s: float
    first_s: float
    last_s: float
    num_first: int  # tokens in the first arrival
    usage: Usage
    failure: str = ""
    gaps_s: tuple[float, ...] = ()  # between arrivals


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a distribution."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a whole run.

    TPOT is the time per token after the first arrival, one value per request; ITL is the time
    between arrivals, which may have several tokens each.
    """

    num_finished: int
    num_failed: int
    failure: str
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    num_good: int  # answers within the objective
    goodput_per_s: float  # of them


def ask_gateway(client: AsyncClient) -> Ask:
    """Queries over gRPC."""

    async def ask(
        prompt: Prompt, num_tokens: int, model: str
    ) -> AsyncGenerator[StreamArrival, None]:
        try:
            async for delta in client.stream(
                prompt, temperature=0, max_tokens=num_tokens, ignore_eos=True, model=model
            ):
                yield StreamArrival(len(delta.token_ids), delta.usage)
        except PagewireError as error:
            raise RequestFailed(str(error)) from error

    return ask


async def run_load(
    ask: Ask, prompts: Sequence[Prompt], load: LoadSettings, advance: Callable[[], None]
) -> list[Sample]:
    """Sends all prompts, at most `concurrency` at a time; returns their samples in order."""
    room: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if load.concurrency is not None:
        room = asyncio.Semaphore(load.concurrency)

    async def work(prompt: Prompt, due_s: float | None) -> Sample:
        if due_s is not None:
            await asyncio.sleep(due_s - time.perf_counter())
        async with room:
            sample = await _sample(ask, prompt, load, due_s)
        advance()
        return sample

    due = _due_s(load, len(prompts))
    return await asyncio.gather(*map(work, prompts, due))


def _due_s(load: LoadSettings, count: int) -> list[float | None]:
    """Due time of each request: a Poisson process, with exponential gaps; None without a rate."""
    if load.rate_per_s is None:
        return [None] * count
    generator, due_s = random.Random(load.seed), time.perf_counter()
    due: list[float | None] = []
    for _ in range(count):
        due.append(due_s)
        due_s += generator.expovariate(load.rate_per_s)
    return due


async def _sample(ask: Ask, prompt: Prompt, load: LoadSettings, due_s: float | None) -> Sample:
    start_s = time.perf_counter() if due_s is None else due_s
    num_first, usage, failure = 0, Usage(), ""
    times_s: list[float] = []
    try:
        async for arrival in ask(prompt, load.output_len, load.model):
            if arrival.num_tokens:
                times_s.append(time.perf_counter())
                num_first = num_first or arrival.num_tokens
            usage = arrival.usage or usage
        if usage.completion_tokens != load.output_len:
            failure = f"{usage.completion_tokens} tokens instead of {load.output_len}"
    except RequestFailed as error:
        failure = str(error)
    times_s = times_s or [time.perf_counter()]
    gaps_s = tuple(b - a for a, b in pairwise(times_s))
    return Sample(start_s, times_s[0], times_s[-1], num_first, usage, failure, gaps_s)


def summarize(samples: Sequence[Sample], objective: Objective = ANYTHING) -> Summary:
    """Rates over the whole run, and distributions over its finished requests."""
    finished = [sample for sample in samples if not sample.failure]
    failures = [sample.failure for sample in samples if sample.failure]
    start_s = min((sample.start_s for sample in samples), default=0.0)
    elapsed_s = max((sample.last_s for sample in samples), default=0.0) - start_s
    num_output = sum(sample.usage.completion_tokens for sample in finished)
    num_total = sum(sample.usage.total_tokens for sample in finished)
    num_good = sum(is_good(sample, objective) for sample in finished)
    return Summary(
        num_finished=len(finished),
        num_failed=len(failures),
        failure=failures[0] if failures else "",
        elapsed_s=elapsed_s,
        requests_per_s=_rate(len(finished), elapsed_s),
        output_tokens_per_s=_rate(num_output, elapsed_s),
        total_tokens_per_s=_rate(num_total, elapsed_s),
        ttft_ms=spread([_ttft_ms(sample) for sample in finished]),
        tpot_ms=spread([_tpot_ms(sample) for sample in finished]),
        itl_ms=spread([gap_s * 1000 for sample in finished for gap_s in sample.gaps_s]),
        e2e_ms=spread([_e2e_ms(sample) for sample in finished]),
        num_good=num_good,
        goodput_per_s=_rate(num_good, elapsed_s),
    )


def is_good(sample: Sample, objective: Objective) -> bool:
    """True if an answer met every limit of the objective."""
    parts = (
        (_ttft_ms(sample), objective.ttft_ms),
        (_tpot_ms(sample), objective.tpot_ms),
        (_e2e_ms(sample), objective.e2e_ms),
    )
    return all(most is None or took <= most for took, most in parts)


def _rate(count: int, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0


def _ttft_ms(sample: Sample) -> float:
    return (sample.first_s - sample.start_s) * 1000


def _tpot_ms(sample: Sample) -> float:
    num_later = sample.usage.completion_tokens - sample.num_first
    return (sample.last_s - sample.first_s) * 1000 / num_later if num_later > 0 else 0.0


def _e2e_ms(sample: Sample) -> float:
    return (sample.last_s - sample.start_s) * 1000


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles; all zero without values."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered)
    return Spread(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values are, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
