"""A closed load on a server, and what its arrival times say. Prints nothing."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagewire._aio import AsyncClient
from pagewire._errors import PagewireError
from pagewire._types import Prompt, Usage


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the server."""

    concurrency: int
    output_len: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one request, in seconds on one clock, or why it failed."""

    start_s: float
    first_s: float
    last_s: float
    num_first: int  # tokens of the first arrival
    usage: Usage
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run. TPOT is the time per token after the first arrival, one value per request."""

    num_finished: int
    num_failed: int
    failure: str
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread


async def run_load(
    client: AsyncClient, prompts: Sequence[Prompt], load: Load, advance: Callable[[], None]
) -> list[Sample]:
    """Sends all prompts, always `concurrency` of them in flight until they run out."""
    samples: list[Sample] = []
    unsent = iter(prompts)

    async def work() -> None:
        for prompt in unsent:
            samples.append(await _sample(client, prompt, load))
            advance()

    await asyncio.gather(*(work() for _ in range(min(load.concurrency, len(prompts)))))
    return samples


async def _sample(client: AsyncClient, prompt: Prompt, load: Load) -> Sample:
    start_s = first_s = last_s = time.perf_counter()
    num_first, usage, failure = 0, Usage(), ""
    try:
        async for delta in client.stream(
            prompt, temperature=0, max_tokens=load.output_len, ignore_eos=True, model=load.model
        ):
            last_s = time.perf_counter()
            if delta.token_ids and not num_first:
                first_s, num_first = last_s, len(delta.token_ids)
            usage = delta.usage or usage
        if usage.completion_tokens != load.output_len:
            failure = f"{usage.completion_tokens} tokens instead of {load.output_len}"
    except PagewireError as error:
        failure = str(error)
    return Sample(start_s, first_s, last_s, num_first, usage, failure)


def summarize(samples: Sequence[Sample]) -> Summary:
    """Rates over the whole run, and the spread over its finished requests."""
    finished = [sample for sample in samples if not sample.failure]
    failures = [sample.failure for sample in samples if sample.failure]
    start_s = min((sample.start_s for sample in samples), default=0.0)
    elapsed_s = max((sample.last_s for sample in samples), default=0.0) - start_s
    num_output = sum(sample.usage.completion_tokens for sample in finished)
    num_total = sum(sample.usage.total_tokens for sample in finished)
    return Summary(
        num_finished=len(finished),
        num_failed=len(failures),
        failure=failures[0] if failures else "",
        elapsed_s=elapsed_s,
        requests_per_s=_rate(len(finished), elapsed_s),
        output_tokens_per_s=_rate(num_output, elapsed_s),
        total_tokens_per_s=_rate(num_total, elapsed_s),
        ttft_ms=spread([(sample.first_s - sample.start_s) * 1000 for sample in finished]),
        tpot_ms=spread([_tpot_ms(sample) for sample in finished]),
    )


def _rate(count: int, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0


def _tpot_ms(sample: Sample) -> float:
    num_later = sample.usage.completion_tokens - sample.num_first
    return (sample.last_s - sample.first_s) * 1000 / num_later if num_later > 0 else 0.0


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles; all zero of nothing."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered)
    return Spread(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
