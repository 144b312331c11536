"""Drafts under a virtual clock: what comes true, what it takes, and what must not change."""

import json
from dataclasses import replace
from functools import cache

import pytest

from scheduler_svc.core import FinishReason, SchedulerConfig
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.speculation.options import Method, SpeculationOptions
from simulator import simulate
from simulator.capacity.measures import DraftSummary, WorkloadSummary, summarize
from simulator.capacity.speculation import VirtualSpeculation
from simulator.capacity.virtual_server import ServedWorkload, VirtualServer
from simulator.capacity.workload import Arrival, Range, Synthetic

CONFIG = SchedulerConfig(
    num_blocks=1025,
    block_size=16,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    max_model_len=4096,
    vocab_size=32_000,
)
FLAT = StepTime(0.010, 1e-5, 0.0)  # a draft costs a thousandth of a step
STEEP = StepTime(0.001, 0.010, 0.0)  # a draft costs nearly a step
SMALL = StepTime(0.0005, 1e-6, 0.0)
K = 4
CROWD = Synthetic(20, 30, Range(20, 200), Range(20, 120), seed=3).arrivals()


def drafting(
    acceptance: float, method: Method = Method.NGRAM, seed: int = 0, **options: int
) -> VirtualSpeculation:
    own = {"num_speculative_tokens": K, **options}
    small = SMALL if method is Method.DRAFT_MODEL else None
    return VirtualSpeculation(SpeculationOptions(method, **own), acceptance, small, seed)


def serve(
    arrivals: list[Arrival],
    speculation: VirtualSpeculation | None,
    step_time: StepTime = FLAT,
    lookahead: int = 1,
    **limits: object,
) -> ServedWorkload:
    config = replace(CONFIG, **limits)  # type: ignore[arg-type]
    server = VirtualServer(config, step_time, lookahead, 0.0001, speculation=speculation)
    return server.serve(arrivals)


@cache
def without_drafts(
    slower: int = 1, step_time: StepTime = FLAT, lookahead: int = 1, **limits: int
) -> ServedWorkload:
    """The crowd, served without drafts: what each method is compared with."""
    return serve(slowed(slower), None, step_time, lookahead, **limits)


def slowed(slower: int) -> list[Arrival]:
    """The crowd, so many times as far apart."""
    return [arrival.at(slower * arrival.arrival_s) for arrival in CROWD]


def told(served: ServedWorkload) -> tuple[WorkloadSummary, DraftSummary]:
    summary = summarize(served)
    assert summary.drafts is not None
    return summary, summary.drafts


ANY_METHOD = pytest.mark.parametrize("method", list(Method))


@ANY_METHOD
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_what_always_comes_true_brings_all_drafts_and_one_more(
    method: Method, lookahead: int
) -> None:
    alone = [Arrival(0.0, 50, 501)]
    fast, drafts = told(serve(alone, drafting(1.0, method), lookahead=lookahead))
    assert drafts.acceptance_rate == 1.0
    # The last verification has room for what is left of the output.
    assert drafts.num_drafted_tokens > K * (drafts.num_verifications - 1)
    assert drafts.tokens_per_verification == pytest.approx(K + 1, abs=0.1)
    slow = summarize(serve(alone, None, lookahead=lookahead))
    assert slow.drafts is None and fast.tpot.p50_s < 0.35 * slow.tpot.p50_s


@ANY_METHOD
@pytest.mark.parametrize("step_time", [FLAT, STEEP])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_never_comes_true_costs_what_it_takes_to_find_out(
    method: Method, step_time: StepTime, lookahead: int
) -> None:
    slower = 20 if step_time is FLAT else 300  # a queue would make more of each second
    calm = slowed(slower)
    off = without_drafts(slower, step_time, lookahead)
    on = serve(calm, drafting(0.0, method), step_time, lookahead)
    _, drafts = told(on)
    assert drafts.num_accepted_tokens == 0
    if method is not Method.DRAFT_MODEL:  # one that fails, and the prediction is only watched
        assert drafts.num_verifications <= len(calm)
    assert on.busy_s <= 1.05 * off.busy_s
    assert summarize(on).e2e.p50_s <= 1.05 * summarize(off).e2e.p50_s


@ANY_METHOD
def test_drafts_that_cost_more_than_they_bring_are_not_made(method: Method) -> None:
    alone = [Arrival(0.0, 50, 801)]
    off, on = (summarize(serve(alone, s, STEEP)) for s in (None, drafting(0.6, method)))
    assert on.e2e.p50_s <= 1.05 * off.e2e.p50_s
    assert on.drafts is not None and on.drafts.num_verifications < 40


@ANY_METHOD
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 60}, {"max_num_seqs": 3}])
def test_every_output_is_as_long_as_without(method: Method, limits: dict[str, int]) -> None:
    off, on = without_drafts(**limits), serve(CROWD, drafting(0.8, method), **limits)
    assert [o.num_tokens for o in on.outcomes] == [a.output_tokens for a in CROWD]
    assert [o.num_tokens for o in on.outcomes] == [o.num_tokens for o in off.outcomes]
    assert {o.reason for o in on.outcomes} == {FinishReason.LENGTH}
    assert told(on)[1].num_accepted_tokens > 0
    assert (on.num_preemptions > 0) is ("num_blocks" in limits)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    first, second, other = (told(serve(CROWD, drafting(0.6, seed=seed)))[0] for seed in (1, 1, 2))
    assert first == second != other


def test_the_share_that_comes_true_is_the_one_asked_for() -> None:
    long = [Arrival(0.0, 50, 4000)]
    one = drafting(0.8, num_speculative_tokens=1)
    _, drafts = told(serve(long, one))
    assert drafts.acceptance_rate == pytest.approx(0.8, abs=0.03)


def test_a_full_worker_drafts_nothing_in_place_of_those_who_wait() -> None:
    """Each position that samples takes one of max_num_seqs places."""
    crowd = [Arrival(0.0, 50, 100) for _ in range(8)]
    _, drafts = told(serve(crowd, drafting(1.0), max_num_seqs=2))
    assert drafts.num_verifications == 0
    _, some = told(serve(crowd, drafting(1.0), max_num_seqs=12))
    _, many = told(serve(crowd, drafting(1.0), max_num_seqs=40))
    assert 0 < 1.5 * some.num_drafted_tokens < many.num_drafted_tokens


def test_the_batch_size_that_disables_drafts_does() -> None:
    crowd = [Arrival(0.0, 50, 100) for _ in range(8)]
    _, drafts = told(serve(crowd, drafting(1.0, disable_by_batch_size=8)))
    assert drafts.num_verifications == 0


def test_the_context_of_a_row_is_read_for_each_of_its_tokens() -> None:
    context = StepTime(0.010, 0.0, 1e-4)
    served = [serve([Arrival(0.0, n, 301)], drafting(0.7), context) for n in (5, 1000)]
    (_, short), (_, long) = map(told, served)
    assert long.num_verifications < 0.5 * short.num_verifications


def test_the_draft_models_time_counts() -> None:
    alone = [Arrival(0.0, 50, 501)]
    quick = summarize(serve(alone, drafting(1.0, Method.DRAFT_MODEL)))
    slow_model = replace(drafting(1.0, Method.DRAFT_MODEL), draft_step_time=StepTime(0.005))
    slow = summarize(serve(alone, slow_model))
    assert slow.tpot.p50_s > 1.5 * quick.tpot.p50_s


# --- the command ---------------------------------------------------------------------------------

COMMAND = [
    *("--rate", "2", "--requests", "40", "--prompt-tokens", "50", "--output-tokens", "60:90"),
    *("--step-time", "0.01,1e-5,0"),
]
NGRAM = ["--speculative-config", '{"method": "ngram"}']
MODEL = ["--speculative-config", '{"method": "draft_model"}']


def summary_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert simulate.main([*COMMAND, *options, "--json"]) == 0
    summary: dict[str, object] = json.loads(capsys.readouterr().out)["summary"]
    return summary


def test_two_commands_compare_off_with_on(capsys: pytest.CaptureFixture[str]) -> None:
    off = summary_of(capsys)
    on = summary_of(capsys, *NGRAM, "--acceptance", "0.9")
    assert off["drafts"] is None and off["num_completed"] == on["num_completed"] == 40
    drafts = on["drafts"]
    assert isinstance(drafts, dict)
    assert 0.7 < drafts["acceptance_rate"] < 0.95 and drafts["tokens_per_verification"] > 3
    assert on["e2e"]["p50_s"] < 0.6 * off["e2e"]["p50_s"]  # type: ignore[index]


def test_people_read_what_came_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([*COMMAND, *NGRAM, "--acceptance", "1"]) == 0
    assert "100.0% of " in (said := capsys.readouterr().out) and "tokens a verification" in said
    model = [*MODEL, "--acceptance", "0.9", "--draft-step-time", "0.0005,0,0"]
    assert simulate.main([*COMMAND, *model]) == 0
    assert "tokens a verification" in capsys.readouterr().out
    assert simulate.main([*COMMAND, *NGRAM, "--acceptance", "1", "--max-num-seqs", "1"]) == 0
    assert "drafts" in (said := capsys.readouterr().out) and "none" in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (NGRAM, "method ngram drafts from tokens, and those of this workload are random: give"),
        (["--acceptance", "0.5"], "--acceptance has no effect without --speculative-config"),
        (["--draft-step-time", "1,0,0"], "--draft-step-time has no effect without"),
        ([*NGRAM, "--acceptance", "1.1"], "--acceptance is 1.1, must be from 0 to 1"),
        ([*NGRAM, "--acceptance", "nan"], "--acceptance is nan, must be from 0 to 1"),
        ([*NGRAM, "--acceptance", "1", "--draft-step-time", "1,0,0"], "is the draft model's"),
        (MODEL, "method draft_model needs --acceptance"),
        ([*MODEL, "--acceptance", "1"], "method draft_model needs --draft-step-time"),
        (["--speculative-config", '{"method": "eagle3"}'], "method 'eagle3' is not there"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate.main([*COMMAND, *options])
    assert caught.value.code == 2 and problem in capsys.readouterr().err
