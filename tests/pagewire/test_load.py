"""The statistics of `pagewire bench`, and the times of its requests."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from pagewire import Prompt, Usage
from pagewire.cli.benchmark.load import (
    LoadSettings,
    Objective,
    RequestFailed,
    Sample,
    Spread,
    StreamArrival,
    percentile,
    run_load,
    spread,
    summarize,
)
from simulator.chaos import virtual_time


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0)])
def test_percentiles_interpolate(share, value):
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], share) == pytest.approx(value)


def test_one_value_is_every_percentile_and_none_is_zero():
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert spread([]) == Spread(0.0, 0.0, 0.0, 0.0)


def test_rates_are_over_the_whole_run_and_tpot_leaves_the_first_arrival_out():
    summary = summarize(
        [
            Sample(10.0, 10.1, 10.5, 1, Usage(prompt_tokens=8, completion_tokens=5)),
            Sample(10.5, 10.8, 12.0, 2, Usage(prompt_tokens=8, completion_tokens=5)),
            Sample(11.0, 11.0, 11.0, 0, Usage(), failure="no"),
        ]
    )
    assert (summary.num_finished, summary.num_failed, summary.failure) == (2, 1, "no")
    assert summary.elapsed_s == pytest.approx(2.0)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.output_tokens_per_s == pytest.approx(5.0)
    assert summary.total_tokens_per_s == pytest.approx(13.0)
    assert summary.ttft_ms.mean == pytest.approx(200.0)
    assert summary.tpot_ms.p50 == pytest.approx((100.0 + 400.0) / 2)


def test_only_answers_that_keep_the_whole_objective_are_good():
    samples = [
        Sample(0.0, 0.1, 0.5, 1, Usage(completion_tokens=5), gaps_s=(0.1, 0.3)),
        Sample(0.0, 0.3, 0.4, 1, Usage(completion_tokens=5)),  # late
        Sample(0.0, 0.1, 0.9, 1, Usage(completion_tokens=5)),  # slow
        Sample(0.0, 0.1, 2.0, 1, Usage(), failure="no"),
    ]
    assert summarize(samples).num_good == 3
    summary = summarize(samples, Objective(ttft_ms=200, tpot_ms=150))
    assert (summary.num_good, summary.goodput_per_s) == (1, 0.5)
    assert summarize(samples, Objective(e2e_ms=500)).num_good == 2
    assert summary.itl_ms == Spread(*(pytest.approx(x) for x in (200.0, 200.0, 280.0, 298.0)))


class Server:
    """Answers with two tokens after a while, and counts concurrent requests."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.num_in_flight = self.most_in_flight = 0

    async def ask(
        self, prompt: Prompt, num_tokens: int, model: str
    ) -> AsyncIterator[StreamArrival]:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        await asyncio.sleep(self.delay_s)
        if prompt == "bad":
            raise RequestFailed("no")
        yield StreamArrival(1)
        yield StreamArrival(1, Usage(prompt_tokens=1, completion_tokens=2))
        self.num_in_flight -= 1


async def test_no_more_than_the_concurrency_are_in_flight_and_a_failure_is_a_sample():
    server = Server(delay_s=0.001)
    prompts = ["a"] * 9 + ["bad"]
    samples = await run_load(server.ask, prompts, LoadSettings(3, 2), lambda: None)
    assert server.most_in_flight == 3
    assert [sample.failure for sample in samples] == [""] * 9 + ["no"]
    assert all(len(sample.gaps_s) == 1 for sample in samples[:9])


def test_requests_at_a_rate_come_when_they_are_due_and_wait_at_their_own_cost(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: time.monotonic())  # which is virtual
    server, load = Server(delay_s=0.05), LoadSettings(1, 2, rate_per_s=1000.0, seed=3)
    samples = virtual_time.run(run_load(server.ask, ["a"] * 4, load, lambda: None))
    due_s = [sample.start_s - virtual_time.START_S for sample in samples]
    assert due_s == sorted(due_s)
    assert due_s[-1] < 0.05  # all were due before the first answer
    assert samples[-1].first_s - samples[-1].start_s > 0.15  # so the last waited for three


async def test_arrivals_are_those_of_a_poisson_process_of_that_rate():
    load = LoadSettings(None, 2, rate_per_s=1e6, seed=0)
    samples = await run_load(Server().ask, ["a"] * 4000, load, lambda: None)
    starts_s = [sample.start_s for sample in samples]
    gaps = [(b - a) * 1e6 for a, b in pairwise(starts_s)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1.0, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.1)  # as exponential gaps have it
