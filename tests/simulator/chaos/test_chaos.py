"""The production shell under virtual time, with failures that it must survive."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.clients.registry import Clients
from scheduler_svc.core import Finished, FinishReason, Request
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.kv.slots import SlotTable
from scheduler_svc.core.step.state import SchedulerState
from scheduler_svc.group import WorkerGroup
from scheduler_svc.sampling import Sampling
from simulator.chaos import story
from simulator.chaos.history import ClientHistory, HistoryRules, expected, judge
from simulator.chaos.scenario import MISHAPS, Mishap, Scenario, draw
from simulator.chaos.story import Wrong, run_scenario, run_seed

# PAGEWIRE_ALL_STORIES=1 tells a hundred of them.
FIRST, COUNT, PART = 0, 100 if os.environ.get("PAGEWIRE_ALL_STORIES") else 40, 20


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_every_story_ends_well(first: int) -> None:
    for seed in range(first, first + PART):
        run_seed(seed, check=check_invariants)


def test_a_story_can_be_told_again() -> None:
    """In another process, too: no dependence on the order of sets or on addresses."""
    code = (
        "from simulator.chaos.story import run_seed; print([run_seed(s).digest for s in (3, 12)])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert elsewhere == str([run_seed(seed).digest for seed in (3, 12)])


def calm_story(*mishaps: Mishap, seed: int = 5) -> Scenario:
    """A scenario without failures except these."""
    scenario, workers = draw(seed), ("worker:0",)
    return replace(
        scenario,
        config=replace(scenario.config, workers=workers),
        num_blocks=(scenario.model.num_blocks,),
        mishaps=mishaps,
        loss=0.0,
        repeat=0.0,
        reorder=0.0,
    )


def test_nothing_is_lost_where_nothing_goes_wrong() -> None:
    counts = run_scenario(calm_story())
    assert counts.num_recoveries == 0 and counts.num_requests > 5
    assert not counts.ends[FinishReason.ERROR.value]


def test_the_workers_state_is_what_the_scheduler_believes_after_every_step() -> None:
    for seed in range(10):
        scenario = replace(draw(seed), mishaps=(), loss=0.0, repeat=0.0, reorder=0.0)
        config = replace(scenario.config, state_check_interval=1, max_grant=16)
        assert run_scenario(replace(scenario, config=config)).num_recoveries == 0


@pytest.mark.parametrize("name", [name for name in MISHAPS if name != "death"])
def test_each_mishap_is_survived(name: str) -> None:
    counts = run_scenario(calm_story(Mishap(at_s=0.3, worker=0, name=name, lasts_s=4.0)))
    is_seen = name not in ("slow", "bad row")
    assert bool(counts.num_recoveries) == is_seen


def two_groups(mishap: Mishap, seed: int) -> Scenario:
    """The same with a second worker as large as the first."""
    calm = calm_story(mishap, seed=seed)
    config = replace(calm.config, workers=("worker:0", "worker:1"))
    return replace(calm, config=config, num_blocks=2 * calm.num_blocks)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "lasts_s"), [("death", 0.0), ("crash", 60.0)])
def test_of_two_groups_one_dies_and_the_other_ends_everything(
    name: str, lasts_s: float, seed: int
) -> None:
    counts = run_scenario(two_groups(Mishap(at_s=0.2, worker=1, name=name, lasts_s=lasts_s), seed))
    assert counts.num_recoveries == 1 and not counts.ends[FinishReason.ERROR.value]


def test_a_worker_that_took_the_epoch_and_never_greeted_is_attached_again() -> None:
    """No other scheduler has taken it: a step hangs for longer than an attach waits."""
    counts = run_scenario(calm_story(Mishap(at_s=0.3, worker=0, name="hang", lasts_s=30.0)))
    assert counts.num_recoveries >= 1


@pytest.mark.parametrize("fault", ["loss", "repeat", "reorder"])
def test_frames_lost_repeated_or_out_of_order_are_survived(fault: str) -> None:
    """Over all scenarios every kind of frame is hit, steps as well as answers."""
    stories = [replace(calm_story(seed=seed), **{fault: 0.03}) for seed in range(4)]
    assert sum(run_scenario(each).num_recoveries for each in stories) >= 4


# --- the judge -----------------------------------------------------------------------------------

RULES = HistoryRules(
    50, 64, (), deadline_slack_s=0.1, may_give_up=False, may_outgrow=False, num_bad_rows=0
)


def seen() -> ClientHistory:
    """A request that ended normally."""
    sampling = Sampling(1.0, 1.0, 0, 0.0, 7)
    request = Request("r", np.arange(5, dtype=np.int32), max_tokens=8, sampling=sampling)
    tokens, reason = expected(request, RULES)
    ends = [(1.0, Finished(request, reason, 5, 8, 0))]
    return ClientHistory(request, 0.0, tokens, ends)


def test_what_went_well_is_not_blamed() -> None:
    assert judge([seen()], RULES) == []


@pytest.mark.parametrize(
    ("distort", "problem"),
    [
        (lambda h: h.tokens.pop(3), "a token is lost"),
        (lambda h: h.tokens.insert(3, h.tokens[2]), "repeated"),
        (lambda h: h.tokens.reverse(), "token 0 is"),
        (lambda h: h.tokens.pop(), "usage says 8 output tokens, 7 came"),
        (lambda h: h.tokens.append(1), "9 tokens, 8 were due"),
        (lambda h: h.ends.append(h.ends[0]), "ended 2 times"),
        (lambda h: h.ends.clear(), "never ended, after 8 of 8 tokens"),
        (lambda h: setattr(h, "num_tokens_after_end", 1), "1 tokens after the end"),
        (lambda h: setattr(h, "aborted_s", 0.5), "after its client had given up"),
        (lambda h: _end(h, FinishReason.EXPIRED), "expired without a deadline"),
        (lambda h: _end(h, FinishReason.ERROR), "failed without cause"),
        (lambda h: _end(h, FinishReason.ABORT), "aborted without a cause"),
        (lambda h: _end(h, FinishReason.STOP), "ended by stop after 8 of 8 tokens"),
    ],
)
def test_the_judge_names_what_is_wrong(
    distort: Callable[[ClientHistory], object], problem: str
) -> None:
    history = seen()
    distort(history)
    assert any(problem in told for told in judge([history], RULES))


def _end(history: ClientHistory, reason: FinishReason) -> None:
    history.ends[0] = (1.0, replace(history.ends[0][1], reason=reason))


# --- the proof of the proof ----------------------------------------------------------------------


def _forget_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = SlotTable.tokens
    monkeypatch.setattr(SlotTable, "tokens", lambda self, slot: tokens(self, slot)[:-1])


def _tell_ends_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tell_ends = Clients.tell_ends

    def twice(self: Clients, finished: list[object]) -> None:
        ends = list(finished)
        tell_ends(self, ends)  # type: ignore[arg-type]
        tell_ends(self, ends)  # type: ignore[arg-type]

    monkeypatch.setattr(Clients, "tell_ends", twice)


def _keep_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerState, "_recycle", lambda self, slot, block_ids: None)


def _believe_every_higher_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants an old bug: a failed attach is taken for another scheduler's."""
    attach = WorkerGroup._attach

    async def forgetful(self: WorkerGroup) -> object:
        self._claimed_epoch = 0
        return await attach(self)

    monkeypatch.setattr(WorkerGroup, "_attach", forgetful)


# With the seed at which the search begins; it goes on if a bug is found elsewhere now.
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (_forget_a_token, 0),
        (_tell_ends_twice, 0),
        (_keep_blocks, 0),
        (_believe_every_higher_epoch, 72),
    ],
)
def test_a_planted_bug_is_found(plant: object, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "PATIENCE_S", 30.0)
    plant(monkeypatch)  # type: ignore[operator]
    with pytest.raises(Wrong, match="seed"):
        for seed in range(first, first + 80):
            run_seed(seed)
