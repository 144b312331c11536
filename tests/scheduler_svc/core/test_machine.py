"""All rules for a scheduler, in any order, with every invariant checked after each.

The rules are in the files `rules_of_*.py`. Hypothesis searches for a short
failing sequence; `soak.py` runs the same rules by the million.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.prefix_cache import PrefixCache
from scheduler_svc.core.kv.slots import SlotTable
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step.apply_tokens import TokenUpdates
from scheduler_svc.core.step.planner import Planner
from scheduler_svc.core.step.reuse import Reuse
from scheduler_svc.core.step.speculation import Speculation
from scheduler_svc.core.step.start import Start, TableStart
from scheduler_svc.core.step.state import SchedulerState
from tests.scheduler_svc.core.draws import HypothesisDraw
from tests.scheduler_svc.core.soak import Tally, assert_found, run_episode
from tests.scheduler_svc.core.world import RULES, Rule, World, draw_config


class _Machine(RuleBasedStateMachine):
    """The base; a method per rule is added below."""

    world: World

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        draw = HypothesisDraw(data)
        self.world = World(draw_config(draw), max_depth=draw.integer(0, 2))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


def _as_method(entry: Rule) -> Callable[..., None]:
    def apply(self: _Machine, data: st.DataObject) -> None:
        entry.apply(self.world, HypothesisDraw(data))
        self.world.check()

    apply.__name__ = entry.name
    when = precondition(lambda self: entry.is_possible(self.world))
    return when(rule(data=st.data())(apply))


def _methods() -> dict[str, Callable[..., None]]:
    """A method per rule; frequent rules occur several times, since hypothesis weighs all alike."""
    return {
        f"{entry.name}{copy or ''}": _as_method(entry)
        for entry in RULES.values()
        for copy in range(max(1, round(entry.weight / 4)))
    }


Machine: Any = type("Machine", (_Machine,), _methods())


def test_hypothesis_finds_no_story_that_goes_wrong() -> None:
    # Of the bugs below it finds twelve, the last one by story 26; three it does not find in 150.
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_there_are_rules() -> None:
    assert len(RULES) >= 30


@pytest.mark.parametrize("episode", range(5))
def test_a_short_soak_is_clean(episode: int) -> None:
    run_episode(seed=7, episode=episode, num_actions=500, tally=Tally(), tell=False)


def test_an_episode_can_be_told_again() -> None:
    first, again = (run_episode(3, 1, 400, Tally(), tell=False) for _ in range(2))
    assert first == again != run_episode(3, 2, 400, Tally(), tell=False)


# --- the proof of the proof: planted bugs are found ----------------------------------------------


def _without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: SchedulerState, sequence: Sequence, status: Any) -> None:
        slot = sequence.slot
        assert slot is not None
        block_ids = self.table.held_blocks(slot)
        self.table.leave(slot, status)
        self._recycle(slot, block_ids)

    monkeypatch.setattr(SchedulerState, "leave", leave)


def _release_head_first(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, ids: release(self, list(reversed(ids))))


def _keep_stale_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "evict", lambda self, block_id: None)


def _compare_no_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignores parents in cache lookups: KV computed after another prefix is read."""
    _keep_stale_hashes(monkeypatch)
    monkeypatch.setattr(PrefixCache, "_num_equal", lambda self, found, *rest: len(found))


def _take_a_full_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(self: Reuse, sequence: Sequence) -> Start:
        groups = self._config.groups
        if not self._config.enable_prefix_caching or len(groups) > 1:
            return Start(more=tuple(TableStart() for _ in groups[1:]))
        hashes = sequence.block_hashes(self._config.block_size)
        shared = self._state.pool.cache.lookup(hashes, sequence.token_ids)
        return Start(len(shared) * self._config.block_size, shared=shared)

    monkeypatch.setattr(Reuse, "cached", cached)


def _forget_that_hits_leave_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "num_free_among", lambda self, ids: 0)


def _drop_late_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenUpdates, "_append_late", lambda self, *late: [])


def _skip_what_is_to_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    all_but_one = property(lambda self: len(self.token_ids) - 1)
    monkeypatch.setattr(Sequence, "num_skippable", all_but_one)


def _count_lost_reports_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts prompt outputs lost with a worker as delivered, so that they are never sent."""
    told = property(lambda self: self.num_prompt_outputs_planned, lambda self, value: None)
    monkeypatch.setattr(Sequence, "num_prompt_outputs_delivered", told)


def _stop_before_min_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = SlotTable.enter

    def enter_without(self: SlotTable, sequence: Sequence, slot: int, *rest: Any) -> None:
        enter(self, sequence, slot, *rest)
        self.min_len[slot] = 0

    monkeypatch.setattr(SlotTable, "enter", enter_without)


def _lose_the_fenced_count(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge = SchedulerState.acknowledge

    def forgetful(self: SchedulerState, step_id: int) -> None:
        before = self.num_fenced_blocks
        acknowledge(self, step_id)
        self.num_fenced_blocks = before

    monkeypatch.setattr(SchedulerState, "acknowledge", forgetful)


def _leave_a_trace_of_a_refused_result(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update

    def partial(self: Scheduler, result: Any) -> Any:
        if len(result.token_ids) != len(self._in_flight[0].sampled_slots):
            self._in_flight.popleft()  # a refused result leaves a trace
        return update(self, result)

    monkeypatch.setattr(Scheduler, "update", partial)


def _count_refused_drafts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = SlotTable.settle

    def settle_at_the_most(self: SlotTable, slot: int, token_ids: Any) -> int:
        most = int(self.num_computed[slot])
        last = settle(self, slot, token_ids)
        self.num_computed[slot] = most
        return last

    monkeypatch.setattr(SlotTable, "settle", settle_at_the_most)


def _plan_on_before_a_range_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "hold", lambda self, draft, chunks, drafts: None)


def _take_back_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "take_back", lambda self, plans, last_step_id: None)


# Each with an episode that finds it.
PLANTED = [
    (_without_a_fence, 0),
    (_release_head_first, 0),
    (_keep_stale_hashes, 0),
    (_compare_no_parents, 0),
    (_take_a_full_hit, 0),
    (_forget_that_hits_leave_the_queue, 0),
    (_drop_late_tokens, 0),
    (_skip_what_is_to_be_reported, 3),
    (_count_lost_reports_as_told, 29),
    (_stop_before_min_tokens, 0),
    (_lose_the_fenced_count, 0),
    (_leave_a_trace_of_a_refused_result, 0),
    (_take_back_no_counters, 27),
    (_count_refused_drafts_as_computed, 4),
    (_plan_on_before_a_range_is_known, 4),
]


@pytest.mark.parametrize(("plant", "first"), PLANTED, ids=[p.__name__ for p, _ in PLANTED])
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert_found(first)
