"""Blocks by sessions: what is handed out first, what is kept, and for how long it is kept."""

import pytest

from scheduler_svc.core import CachePolicy
from scheduler_svc.core.kv.branches import PATIENCE
from scheduler_svc.core.kv.return_gaps import ReturnGaps
from scheduler_svc.core.kv.session_pool import SessionPool
from tests.scheduler_svc.core.builders import (
    answer,
    make_request,
    make_scheduler,
    plan_step,
    step,
)

SIZE = 4


def make(num_blocks: int = 13) -> SessionPool:
    return SessionPool(num_blocks, SIZE)


def turn(
    pool: SessionPool, number: int, found: list[int], num_new: int, num_answer: int = 1
) -> list[int]:
    """A sequence that finds some blocks, takes others, and ends; returns all of them."""
    pool.share(found)
    pool.enter(number, pool.now_s, found[-1] if found else None, found)
    held = found + pool.take(num_new)
    pool.leave(number, held, num_answer)
    pool.release(held)
    return held


def free(pool: SessionPool) -> list[int]:
    return list(pool.free_queue())


def test_of_two_sessions_the_one_that_paused_first_gives_way_end_first() -> None:
    pool = make()
    first, second = turn(pool, 1, [], 3), turn(pool, 2, [], 3)
    never_used = [7, 8, 9, 10, 11, 12]
    assert free(pool) == [*never_used, *reversed(first), *reversed(second)]
    turn(pool, 3, first, 0)
    assert free(pool) == [*never_used, *reversed(second), *reversed(first)]
    assert pool.take(8) == [*never_used, *reversed(second[1:])]


def test_what_a_session_goes_on_without_gives_way_before_all_that_is_used() -> None:
    pool = make(7)
    old = turn(pool, 1, [], 2)
    edited = turn(pool, 2, [], 4, num_answer=2)
    turn(pool, 3, edited[:2], 0)
    assert free(pool)[:2] == edited[:1:-1]
    assert free(pool)[2:4] == old[::-1]


def test_a_beginning_that_sessions_share_outlives_each_of_them() -> None:
    pool = make(9)
    first = turn(pool, 1, [], 4, num_answer=0)
    second = turn(pool, 2, first[:2], 2)
    order = free(pool)
    assert order.index(first[3]) < order.index(first[2]) < order.index(first[1])
    assert order.index(second[2]) < order.index(first[1]) < order.index(first[0])
    third = turn(pool, 3, first[:2], 2)
    assert free(pool)[-4:] == [third[3], third[2], first[1], first[0]]


def test_a_fork_takes_nothing_from_the_session_that_it_forks_from() -> None:
    pool = make(12)
    parent = turn(pool, 1, [], 6)
    turn(pool, 2, parent[:3], 1)  # as a subagent whose prompt begins like its parent's
    assert not set(parent) & set(free(pool)[:3]), "what its parent will read was given up"
    assert turn(pool, 3, parent, 1)[:6] == parent


def test_blocks_that_a_waiting_sequence_reads_go_last() -> None:
    pool = make(7)
    first, second = turn(pool, 1, [], 3), turn(pool, 2, [], 3)
    pool.expect(3, first, 3 * SIZE)
    assert free(pool) == [*reversed(second), *reversed(first)]
    assert pool.take(4) == [*reversed(second), first[2]]
    assert pool.num_awaited_evicted == 1


def test_of_those_that_wait_the_last_turn_loses_first_and_comes_later_for_it() -> None:
    pool = make(9)
    first, second = turn(pool, 1, [], 4), turn(pool, 2, [], 4)
    pool.expect(3, first, 5 * SIZE)
    pool.expect(4, second, 6 * SIZE)
    before = pool.turn_of(4)
    assert before > pool.turn_of(3)
    assert pool.take(2) == [second[3], second[2]]
    assert pool.turn_of(4) == before + 2 * SIZE * PATIENCE


def test_a_sequence_that_is_gone_keeps_nothing() -> None:
    pool = make(7)
    first, second = turn(pool, 1, [], 3), turn(pool, 2, [], 3)
    pool.expect(3, first, 3 * SIZE)
    pool.not_expected(3)
    pool.not_expected(3)
    assert free(pool) == [*reversed(second), *reversed(first)], "it counts as used just now"


def test_what_is_kept_is_kept_until_sessions_would_have_come_back() -> None:
    pool = make(7)
    turn(pool, 1, [], 6)
    pool.expect(2, [], 2 * SIZE)
    pool.now_s = pool.gaps.horizon_s / 2
    pool.let_age()
    assert pool.num_kept == 6 and not pool.may_enter(2)
    pool.now_s = 2 * pool.gaps.horizon_s
    pool.let_age()
    assert pool.num_kept == 0 and pool.may_enter(2)


def test_a_turn_comes_when_its_work_was_done_many_times() -> None:
    pool = make(7)
    turn(pool, 1, [], 6)
    pool.expect(2, [], 2 * SIZE)
    pool.work = PATIENCE * 2 * SIZE - 1
    assert not pool.may_enter(2)
    pool.work += 1
    assert pool.may_enter(2)


def test_of_those_that_lost_all_one_enters_after_the_other() -> None:
    pool = make(13)
    turn(pool, 1, [], 12)
    for number in (2, 3):
        pool.expect(number, [], 2 * SIZE)
    pool.work = PATIENCE * 2 * SIZE
    assert pool.may_enter(2) and pool.may_enter(3)
    pool.enter(2, 0.0, None, [])
    assert not pool.may_enter(3)
    pool.work *= 2
    assert pool.may_enter(3)


@pytest.mark.parametrize(("gap_s", "horizon_s"), [(0.0, 1 / 64), (1.0, 1.0), (3.0, 4.0)])
def test_the_horizon_is_learned(gap_s: float, horizon_s: float) -> None:
    gaps = ReturnGaps()
    for _ in range(15):
        gaps.observe(gap_s)
    assert gaps.horizon_s == 8.0, "too few were seen"
    for _ in range(85):
        gaps.observe(gap_s)
    assert gaps.horizon_s == horizon_s
    for _ in range(2):
        gaps.observe(1e12)
    assert gaps.horizon_s == horizon_s, "one in fifty decides"
    for _ in range(5000):
        gaps.observe(600.0)
    assert gaps.horizon_s == 1024.0, "what was long ago decides"


def test_a_newcomer_enters_although_cached_sessions_never_pause() -> None:
    limits = {"blocks": 46, "block_size": SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    scheduler = make_scheduler(**limits, max_model_len=128, cache_policy=CachePolicy.SESSIONS)
    contexts = {name: [100 * number + t for t in range(60)] for number, name in enumerate("ab")}
    newcomer, num_turns = None, 0
    for number in range(400):
        for name, tokens in contexts.items():
            if scheduler.find(name) is None:  # its next turn comes at once
                scheduler.add(make_request(name, [*tokens, number], max_tokens=1))
                num_turns += newcomer is not None
        if number % 6 == 0:  # one of two others decodes at any time
            scheduler.add(make_request(f"other {number}", 3, max_tokens=9, skip_prefix_cache=True))
        if number == 20:
            newcomer = scheduler.add(make_request("new", range(300, 360), max_tokens=1))
        step(scheduler)
        if newcomer is not None and newcomer.has_run:
            break
    assert newcomer is not None and newcomer.has_run
    assert num_turns > 5, "it waited for nothing"
    assert newcomer.num_overtaken <= scheduler.config.max_overtakes


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_of_waiting_turns_those_in_the_cache_enter_first_by_sessions(policy: CachePolicy) -> None:
    scheduler = make_scheduler(
        blocks=20, block_size=SIZE, max_num_seqs=1, max_model_len=64, cache_policy=policy
    )
    known = [*range(100, 130)]
    scheduler.add(make_request("first", known, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("running", [1, 2, 3], max_tokens=3))
    step(scheduler)
    scheduler.add(make_request("new", range(200, 230), max_tokens=1))
    scheduler.add(make_request("next", [*known, 7], max_tokens=1))
    entered = list[str]()
    while scheduler.num_waiting:
        plan = plan_step(scheduler)
        entered += [each.request.request_id for each in plan.new_sequences]
        answer(scheduler, *[500] * len(plan.sampled_slots))
    is_first_come = policy is CachePolicy.LRU
    assert entered == (["new", "next"] if is_first_come else ["next", "new"])
