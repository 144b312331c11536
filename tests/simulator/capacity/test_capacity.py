"""The virtual server against arithmetic: latencies that can be computed by hand."""

import json
import math
from dataclasses import replace

import pytest

from scheduler_svc.core import Policy, SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from simulator import simulate
from simulator.capacity.measures import CapacityObjective, WorkloadSummary, summarize
from simulator.capacity.rate_search import highest, is_bounded, trials
from simulator.capacity.virtual_server import ServedWorkload, VirtualServer
from simulator.capacity.workload import Arrival, BadTrace

CONFIG = SchedulerConfig(
    num_blocks=1025,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=4096,
    vocab_size=32_000,
)
STEP_TIME = StepTime(0.010, 1e-4, 0.0)


def serve(
    *arrivals: Arrival, lookahead: int = 1, wire_s: float = 0.0, **limits: object
) -> ServedWorkload:
    config = replace(CONFIG, **limits)  # type: ignore[arg-type]
    return VirtualServer(config, STEP_TIME, lookahead, wire_s).serve(arrivals)


def summary(*arrivals: Arrival, **options: object) -> WorkloadSummary:
    return summarize(serve(*arrivals, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_request_alone_takes_one_prefill_and_its_decodes(lookahead: int) -> None:
    (only,) = serve(Arrival(1.0, 100, 11), lookahead=lookahead).outcomes
    assert only.first_token_s == pytest.approx(1.0 + 0.010 + 100 * 1e-4)
    assert only.last_token_s == pytest.approx(only.first_token_s + 10 * (0.010 + 1e-4))
    assert only.num_tokens == 11


def test_the_wire_costs_every_step_without_look_ahead_and_the_first_with_it() -> None:
    in_lock_step, ahead = (
        serve(Arrival(0.0, 100, 11), lookahead=lookahead, wire_s=0.001).outcomes[0]
        for lookahead in (0, 1)
    )
    calm_s = 0.020 + 10 * 0.0101
    assert in_lock_step.last_token_s == pytest.approx(calm_s + 11 * 0.002)
    assert ahead.last_token_s == pytest.approx(calm_s + 0.002)


def test_with_a_target_a_long_prompt_takes_its_time_and_leaves_the_others_theirs() -> None:
    arrivals = [Arrival(0.0, 16, 8), Arrival(0.011, 4000, 1)]

    def ends_s(target_s: float | None) -> list[float]:
        server = VirtualServer(CONFIG, STEP_TIME, lookahead=1, target_itl_s=target_s)
        return [outcome.last_token_s for outcome in server.serve(arrivals).outcomes]

    streams_s, prompts_s = zip(ends_s(None), ends_s(0.030), strict=True)
    assert streams_s[0] > 6 * 0.060, "it waited for a full step with each of its tokens"
    assert streams_s[1] < 0.012 + 7 * 0.031
    assert prompts_s[0] < prompts_s[1] < 2 * prompts_s[0]


def test_prompts_longer_than_the_budget_take_several_steps() -> None:
    (only,) = serve(Arrival(0.0, 1200, 1)).outcomes
    assert only.last_token_s == pytest.approx(3 * 0.010 + 1200 * 1e-4)


def test_whoever_finds_no_slot_waits_for_the_end_of_somebody_else() -> None:
    first, second = serve(Arrival(0.0, 100, 11), Arrival(0.0, 100, 11), max_num_seqs=1).outcomes
    assert second.first_token_s == pytest.approx(first.last_token_s + 0.020)


def test_a_shared_prefix_is_computed_once() -> None:
    shared = [Arrival(float(n), 160, 2, prefix="p", prefix_tokens=128) for n in range(3)]
    told = summary(*shared)
    assert told.cached_share == pytest.approx(2 * 128 / (3 * 160))
    assert told.ttft.p50_s == pytest.approx(0.010 + 32 * 1e-4)
    assert summary(*shared, enable_prefix_caching=False).cached_share == 0


def test_preemptions_show_when_the_cache_is_too_small() -> None:
    crowd = [Arrival(0.0, 60, 60) for _ in range(8)]
    assert summary(*crowd).num_preemptions == 0
    tight = summary(*crowd, num_blocks=33)
    assert tight.num_preemptions > 0 and tight.num_completed == 8 and tight.peak_blocks == 1.0


def test_what_is_refused_or_late_never_comes() -> None:
    crowd = [Arrival(0.0, 100, 100) for _ in range(20)]
    told = summary(*crowd, max_waiting_requests=4)
    assert told.num_refused == 20 - 4 and told.num_completed == 4
    assert told.e2e.p99_s == math.inf
    late = summary(Arrival(0.0, 100, 1000, timeout_s=1.0))
    assert (late.num_expired, late.num_completed) == (1, 0)


def test_the_policy_is_the_cores_own() -> None:
    arrivals = [Arrival(0.0, 100, 50, priority=1) for _ in range(4)]
    arrivals.append(Arrival(0.001, 100, 50, priority=0))
    urgent = [
        serve(*arrivals, max_num_seqs=1, policy=policy).outcomes[-1].last_token_s
        for policy in (Policy.FCFS, Policy.PRIORITY)
    ]
    assert urgent[1] < urgent[0] / 3


def test_a_request_that_can_never_run_is_named() -> None:
    with pytest.raises(BadTrace, match="request 2: prompt_token_ids has 5000 tokens"):
        serve(Arrival(0.0, 10, 1), Arrival(0.0, 5000, 1))


def test_the_same_workload_gives_the_same_numbers() -> None:
    arrivals = [Arrival(n / 50, 50 + n % 70, 20 + n % 30) for n in range(100)]
    assert summary(*arrivals, num_blocks=65) == summary(*arrivals, num_blocks=65)


def test_the_capacity_of_one_slot_is_one_over_its_service_time() -> None:
    """Regular arrivals: the queue stays empty up to that rate, and grows above it."""
    service_s = 0.020 + 9 * 0.0101
    clockwork = [Arrival(n * 1.0, 100, 10) for n in range(1, 201)]
    config = replace(CONFIG, max_num_seqs=1, enable_prefix_caching=False)
    tried = list(
        trials(
            lambda: VirtualServer(config, STEP_TIME, lookahead=1),
            clockwork,
            CapacityObjective(ttft_p99_s=0.05),
        )
    )
    best = highest(tried)
    assert best is not None and is_bounded(tried)
    assert best.rate_per_s == pytest.approx(1 / service_s, rel=0.02)


def test_an_objective_that_no_rate_meets_is_said_to_be_so() -> None:
    arrivals = [Arrival(n * 1.0, 100, 10) for n in range(1, 5)]
    tried = list(
        trials(
            lambda: VirtualServer(CONFIG, STEP_TIME, 1),
            arrivals,
            CapacityObjective(ttft_p99_s=0.001),
        )
    )
    assert highest(tried) is None and "p99 time to first token is 0.020 s" in str(tried[-1].excess)


# --- the command ---------------------------------------------------------------------------------

WORKLOAD = ["--rate", "5", "--requests", "50", "--prompt-tokens", "10:50", "--output-tokens", "8"]


def test_the_command_answers_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--step-time", "0.01,1e-4,0", "--ttft-p99-s", "0.1", "--max-num-seqs", "2"]
    assert simulate.main([*WORKLOAD, *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["num_completed"] == 50
    # Two slots, each for a prefill and seven decodes of at least 10 ms.
    assert 1 < told["capacity_per_s"] < 2 / 0.08
    assert told["is_bounded"] is True


def test_the_command_answers_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*WORKLOAD, "--step-time", "0.01,1e-4,0", "--e2e-p99-s", "1e-3"]) == 1
    told = capsys.readouterr().out
    assert "50 completed" in told and "no rate meets the objective" in told


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--worker", "x:1"], "has no effect without a worker"),
        (["--max-grant", "3"], "--max-grant has no effect"),
        (["--preemption", "swap"], "--preemption has no effect without a worker"),
        (["--trace", "t.jsonl"], "--rate generates what --trace contains"),
        (["--ttft-p99-s", "0"], "ttft_p99_s is 0.0"),
        (["--policy", "none"], "--policy"),
        (["--no-such-option"], "--no-such-option"),
        (["--prompt-tokens", "5:1"], "'5:1' is not LO:HI"),
        (["--max-model-len", "20"], "max_model_len 20"),
        (["--wire-s", "-1"], "--wire-s is -1.0"),
    ],
)
def test_a_bad_option_is_refused_by_name(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate.main([*WORKLOAD, "--step-time", "0.01,0,0", *options])
    assert caught.value.code == 2 and problem in capsys.readouterr().err
