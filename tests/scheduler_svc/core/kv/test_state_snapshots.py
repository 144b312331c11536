"""Sequences with states begin after a snapshot: when one is made, found, and overwritten."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core import KvGroup, Scheduler, StepResult
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.state_snapshots import StateSnapshots
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.state import SchedulerState
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler, plan_step
from tests.scheduler_svc.core.kv.test_identity import COLLISIONS
from tests.scheduler_svc.core.soak import assert_found

Monkeypatch = pytest.MonkeyPatch
SIZE = 4


def scheduler_of(**limits: Any) -> Scheduler:
    fields = {
        "blocks": 400,
        "max_model_len": 600,
        "max_num_batched_tokens": 600,
        "has_states": True,
        "num_state_snapshots": 12,
        "state_interval": 8,
    }
    return make_scheduler(**{**fields, **limits})


def run(scheduler: Scheduler, name: str, prompt: Any, max_tokens: int = 1, **rest: Any) -> Any:
    """Runs a request to its end; returns (tokens that it skipped, positions of snapshots)."""
    scheduler.add(make_request(name, prompt, max_tokens=max_tokens, **rest))
    skipped, saved = None, []
    while scheduler.num_running or scheduler.num_waiting:
        plan = plan_step(scheduler)
        if plan.new_sequences:
            (new,) = plan.new_sequences
            skipped = new.num_computed_tokens
            assert (new.state_snapshot is None) == (not skipped)
        saved += [save.position for save in plan.state_saves]
        answer(scheduler, *[500] * len(plan.sampled_slots))
        check_invariants(scheduler)
    return skipped, saved


def test_a_prompt_leaves_a_snapshot_before_its_last_token_and_an_equal_one_begins_there() -> None:
    scheduler = scheduler_of()
    assert run(scheduler, "a", 21) == (0, [20])
    assert run(scheduler, "b", 21) == (20, [])
    assert run(scheduler, "c", 20) == (0, [16]), "the state after 20 tokens is none after 16"
    assert run(scheduler, "d", 20) == (16, [])
    assert run(scheduler, "e", 40) == (20, [36])


def test_the_next_turn_begins_after_the_last_answer() -> None:
    scheduler, prompt = scheduler_of(), list(range(1, 22))
    skipped, saved = run(scheduler, "a", prompt, max_tokens=30)
    assert (skipped, saved) == (0, [20, 24, 32, 40, 48])
    prompt += [500] * 30 + [9] * 5
    assert run(scheduler, "b", prompt) == (48, [])
    snapshots = scheduler.internal_state.snapshots
    assert snapshots is not None and len(snapshots) == 2, "the older ones gave way"


def test_a_prefix_that_two_prompts_share_is_saved_by_the_second_and_hit_by_the_third() -> None:
    scheduler, system = scheduler_of(), list(range(1, 34))
    assert run(scheduler, "a", [*system, *[7] * 12]) == (0, [44])
    assert run(scheduler, "b", [*system, *[8] * 12]) == (0, [32, 44])
    assert run(scheduler, "c", [*system, *[9] * 12]) == (32, [44])


def test_few_tokens_are_not_worth_a_snapshot() -> None:
    scheduler = scheduler_of(state_interval=16)
    assert run(scheduler, "a", 18) == (0, [16])
    assert run(scheduler, "b", 29) == (16, []), "12 tokens after the hit"
    assert run(scheduler, "c", 33) == (16, [32])


def test_without_room_a_snapshot_is_left_out_and_the_oldest_gives_way() -> None:
    scheduler = scheduler_of(num_state_snapshots=2)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        assert run(scheduler, name, range(first, first + 21)) == (0, [20])
    assert run(scheduler, "d", range(100, 121)) == (0, [20]), "overwritten by c's"
    assert run(scheduler, "e", range(300, 321)) == (20, [])
    crowded = scheduler_of(num_state_snapshots=1)
    for first in (100, 200):
        crowded.add(make_request(f"{first}", range(first, first + 21), max_tokens=1))
    (save,) = plan_step(crowded).state_saves
    assert (save.position, save.snapshot) == (20, 1)


def test_what_a_step_reads_is_not_overwritten_by_it() -> None:
    scheduler = scheduler_of(num_state_snapshots=1)
    run(scheduler, "a", 21)
    scheduler.add(make_request("b", range(100, 106), max_tokens=9))
    for _ in range(2):
        plan_step(scheduler)
        answer(scheduler, 500)
    scheduler.add(make_request("c", 21, max_tokens=1))
    plan = plan_step(scheduler)  # in which b has computed 8 tokens
    assert [new.state_snapshot for new in plan.new_sequences] == [1] and plan.state_saves == ()
    answer(scheduler, 500, 500)
    check_invariants(scheduler)


def test_a_hit_ends_where_blocks_of_all_groups_end() -> None:
    scheduler = scheduler_of(kv_groups=(KvGroup(4), KvGroup(8), KvGroup(4, window=6)))
    assert run(scheduler, "a", 21) == (0, [16])
    assert run(scheduler, "b", 21) == (16, [])


def test_chunks_and_grants_make_the_same_snapshots() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=7)
    assert run(scheduler, "a", 21, max_tokens=20) == (0, [20, 24, 32, 40])
    granted = scheduler_of()
    granted.add(make_request("a", 21, max_tokens=20))
    saved = [save.position for save in plan_step(granted).state_saves]
    answer(granted, 500)
    while granted.num_running:
        plans = granted.grant(5)
        saved += [save.position for plan in plans for save in plan.state_saves]
        for _ in plans:
            answer(granted, 500)
            check_invariants(granted)
    assert saved == [20, 24, 32, 40]
    assert run(granted, "b", [*range(1, 22), *[500] * 20, 3]) == (40, [])


@pytest.mark.parametrize("num_accepted", range(6))
def test_no_draft_is_the_last_token_before_a_snapshot(num_accepted: int) -> None:
    """A worker makes snapshots in passing, and states after a draft that is refused are wrong."""
    scheduler, prompt = scheduler_of(), list(range(1, 22))
    scheduler.add(make_request("a", prompt, max_tokens=30))
    saved, longest = [], 0
    while scheduler.num_running or scheduler.num_waiting:
        (sequence,) = [*scheduler.internal_state.running.sequences] or [None]
        drafts = {} if sequence is None else {sequence.slot: np.full(5, 500, dtype=np.int32)}
        plan = scheduler.schedule(drafts=drafts)
        assert plan is not None
        num_drafted = sum(map(len, plan.drafts.values()))
        longest = max(longest, num_drafted)
        known = int(plan.num_computed[0]) + (21 if plan.new_sequences else 1)
        saved += [save.position for save in plan.state_saves]
        assert all(save.position <= known for save in plan.state_saves)
        count = 1 + min(num_accepted, num_drafted)
        ranges = np.array([count], dtype=np.int32) if plan.drafts else None
        tokens = np.full(count, 500, dtype=np.int32)
        scheduler.update(StepResult(plan.step_id, tokens, num_sampled=ranges))
        check_invariants(scheduler)
    assert saved == [20, 24, 32, 40, 48] and longest > 2
    assert run(scheduler, "b", [*prompt, *[500] * 30, 9]) == (48, [])


def test_who_opts_out_leaves_none_and_finds_none() -> None:
    scheduler = scheduler_of()
    assert run(scheduler, "a", 21, skip_prefix_cache=True) == (0, [])
    run(scheduler, "b", 21)
    assert run(scheduler, "c", 21, skip_prefix_cache=True) == (0, [])
    assert run(scheduler, "d", 21, cache_salt="salt") == (0, [20])


def test_a_reset_of_the_cache_and_a_lost_worker_leave_no_snapshot() -> None:
    scheduler = scheduler_of()
    run(scheduler, "a", 21)
    scheduler.reset_prefix_cache()
    snapshots = scheduler.internal_state.snapshots
    assert snapshots is not None and len(snapshots) == 0
    assert run(scheduler, "b", 21) == (0, [20])
    scheduler.worker_lost(num_state_snapshots=3)
    scheduler.worker_back()
    assert run(scheduler, "c", 21) == (0, [20])
    assert scheduler.internal_state.num_state_snapshots == 3


def test_states_that_are_not_finite_are_forgotten() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", 21, max_tokens=20))
    for _ in range(5):
        plan_step(scheduler)
        answer(scheduler, 500)
    plan_step(scheduler)
    answer(scheduler, 0, bad_rows=(0,))
    check_invariants(scheduler)
    assert run(scheduler, "b", 21)[0] == 0


@COLLISIONS
def test_equal_hashes_of_other_tokens_are_no_hit(
    collide: Callable[[Monkeypatch], None], monkeypatch: Monkeypatch
) -> None:
    collide(monkeypatch)
    scheduler = scheduler_of()
    prompts = {salt: list(range(at, at + 21)) for salt, at in (("", 1), ("x", 1), ("", 100))}
    for number, (salt, prompt) in enumerate(prompts.items()):
        skipped, _ = run(scheduler, f"{number}", prompt, cache_salt=salt)
        assert skipped == 0


def hits_of_sessions(num_turns: int, **limits: Any) -> float:
    """The part of all prompts that eight sessions with one system prompt find cached."""
    scheduler = make_scheduler(
        blocks=9000, max_model_len=9000, block_size=16, max_num_batched_tokens=9000, **limits
    )
    random = np.random.default_rng(5)
    system = random.integers(1, 400, size=290).tolist()
    sessions = [list(system) for _ in range(8)]
    for turn in range(num_turns):
        for number, prompt in enumerate(sessions):
            prompt += random.integers(1, 400, size=int(random.integers(40, 250))).tolist()
            num_answered = int(random.integers(20, 90))
            scheduler.add(make_request(f"{number}-{turn}", prompt, max_tokens=num_answered))
            while scheduler.num_running or scheduler.num_waiting:
                plan = plan_step(scheduler)
                answer(scheduler, *[500] * len(plan.sampled_slots))
            prompt += [500] * num_answered
    counters = scheduler.counters
    return counters.prefix_hit_tokens / counters.prefix_query_tokens


@pytest.mark.parametrize("num_snapshots", [11, 16, 64])
def test_turns_hit_nearly_as_much_as_those_of_a_model_without_states(num_snapshots: int) -> None:
    """Each turn makes two snapshots, of which the first is needless once there is the second."""
    dense = hits_of_sessions(8)
    hybrid = hits_of_sessions(8, has_states=True, num_state_snapshots=num_snapshots)
    assert 0.8 < dense < 0.95
    assert hybrid > 0.95 * dense


def test_a_prompt_that_others_begin_after_does_not_give_way_to_their_answers() -> None:
    scheduler, prompt = scheduler_of(num_state_snapshots=5), list(range(1, 22))
    for number, answered in enumerate((1, 1, *[12] * 9)):
        skipped, _ = run(scheduler, f"{number}", prompt, max_tokens=answered)
        assert skipped == (20 if number else 0)
    assert run(scheduler, "b", range(100, 121), max_tokens=12) == (0, [20, 24, 32])
    assert run(scheduler, "c", range(100, 121), max_tokens=1)[0] == 0, "its answer's is kept"
    assert run(scheduler, "d", prompt, max_tokens=1)[0] == 20


# --- planted bugs --------------------------------------------------------------------------------


def _keep_snapshots_over_a_loss(monkeypatch: Monkeypatch) -> None:
    clear = SchedulerState.clear

    def keep(self: SchedulerState, *sizes: int) -> None:
        before = getattr(self, "snapshots", None)
        clear(self, *sizes)
        if before is not None:
            self.snapshots = before

    monkeypatch.setattr(SchedulerState, "clear", keep)


def _find_what_a_step_taken_back_was_to_save(monkeypatch: Monkeypatch) -> None:
    cross = StateSnapshots.cross

    def cross_and_seal(self: StateSnapshots, *arguments: Any) -> Any:
        saves = cross(self, *arguments)
        self._due += 1
        return saves

    monkeypatch.setattr(StateSnapshots, "cross", cross_and_seal)


def _find_by_hash_of_any_length(monkeypatch: Monkeypatch) -> None:
    find = StateSnapshots.find

    def longest(self: StateSnapshots, sequence: Sequence, num_cached: int) -> Any:
        end, snapshot = find(self, sequence, num_cached)
        return (num_cached if snapshot else end), snapshot

    monkeypatch.setattr(StateSnapshots, "find", longest)


def _hand_out_what_is_discarded_twice(monkeypatch: Monkeypatch) -> None:
    def discard(self: BlockPool, block_id: int) -> None:
        self.release([block_id])

    monkeypatch.setattr(BlockPool, "discard", discard)


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (_keep_snapshots_over_a_loss, 11),
        (_find_what_a_step_taken_back_was_to_save, 1),
        (_find_by_hash_of_any_length, 16),
        (_hand_out_what_is_discarded_twice, 19),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[Monkeypatch], None], first: int, monkeypatch: Monkeypatch
) -> None:
    plant(monkeypatch)
    assert_found(first)
