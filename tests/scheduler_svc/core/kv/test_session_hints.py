"""Hints about sessions: used where there is room, and never at another tenant's cost."""

import pytest

from scheduler_svc.core import CachePolicy, SessionHint
from scheduler_svc.core.kv.branches import PATIENCE
from scheduler_svc.core.kv.session_pool import SessionPool
from scheduler_svc.core.request.session_hint import NOTHING_TOLD, ToldSession
from tests.scheduler_svc.core.builders import make_request, make_scheduler, step
from tests.scheduler_svc.core.kv.test_session_pool import SIZE, free, make

HOUR_S = 3600.0


def told(name: str = "", parent: str = "", ttl_s: float | None = None, of: str = "") -> ToldSession:
    return ToldSession.of(SessionHint(name, parent, ttl_s), of, "")


def turn(
    pool: SessionPool,
    number: int,
    found: list[int],
    num_new: int,
    hint: ToldSession = NOTHING_TOLD,
    num_answer: int = 1,
) -> list[int]:
    """A sequence that finds some blocks, takes others, and ends; returns all of them."""
    pool.share(found)
    pool.enter(number, pool.now_s, found[-1] if found else None, found, hint)
    held = found + pool.take(num_new)
    pool.leave(number, held, num_answer)
    pool.release(held)
    return held


def age(pool: SessionPool, now_s: float) -> None:
    pool.now_s = now_s
    pool.let_age()


# --- ends ----------------------------------------------------------------------------------------


def test_a_session_that_says_it_ends_gives_way_before_all_others() -> None:
    pool = make(10)
    older = turn(pool, 1, [], 3)
    last = turn(pool, 2, [], 3, told("a", ttl_s=0.0))
    assert free(pool) == [7, 8, 9, *reversed(last), *reversed(older)]
    assert pool.num_kept == 3 and not len(pool.named)


def test_a_session_ends_by_its_name_and_what_it_shares_stays() -> None:
    pool = make(13)
    first = turn(pool, 1, [], 4, told("a"))
    second = turn(pool, 2, first[:2], 2, told("b"))
    pool.end(("", "a"))
    pool.end(("", "a"))
    pool.end(("", "never heard of"))
    order = free(pool)
    assert order.index(first[2]) < order.index(second[3]) < order.index(first[1])
    assert turn(pool, 3, second, 1, told("b"))[:4] == second


def test_a_preempted_last_turn_keeps_its_session() -> None:
    pool = make(7)
    pool.enter(1, 0.0, None, [], told("a", ttl_s=0.0))
    held = pool.take(3)
    pool.leave(1, held, 1, is_over=False)
    pool.release(held)
    assert pool.num_kept == 3


def test_a_session_whose_turn_waits_has_not_ended() -> None:
    pool = make(7)
    held = turn(pool, 1, [], 3, told("a"))
    pool.expect(2, held, 4 * SIZE)
    pool.end(("", "a"))
    assert free(pool)[-3:] == held[::-1]


# --- names ---------------------------------------------------------------------------------------


def test_a_named_session_that_was_compacted_gives_up_its_old_context() -> None:
    pool = make(20)
    system = turn(pool, 1, [], 4, told("other"))[:2]
    other = turn(pool, 2, system, 2)
    old = turn(pool, 3, system, 5, told("a"))
    turn(pool, 4, system, 1, told("a"))
    assert free(pool)[: 7 + 5][-5:] == old[:1:-1], "the old context is kept"
    assert set(other[2:]) <= set(free(pool)[12:])


def test_without_a_name_a_compacted_session_is_another_one() -> None:
    pool = make(20)
    system = turn(pool, 1, [], 4)[:2]
    old = turn(pool, 3, system, 5)
    before = pool.num_kept
    turn(pool, 4, system, 1)
    assert pool.num_kept == before + 1
    assert set(old[2:]).isdisjoint(free(pool)[:8])


def test_a_request_beside_a_session_takes_nothing_from_it_under_its_name() -> None:
    pool = make(20)
    system = turn(pool, 1, [], 4)[:2]
    main = turn(pool, 2, system, 5, told("a"))
    turn(pool, 3, [], 2, told("a"))  # a title, say: it begins otherwise
    assert set(main).isdisjoint(free(pool)[:8])
    assert turn(pool, 4, main, 1, told("a"))[: len(main)] == main


def test_a_session_of_another_name_forks_although_it_repeats_all() -> None:
    pool = make(12)
    parent = turn(pool, 1, [], 4, told("a"))
    turn(pool, 2, parent, 1, told("b", parent="a"))
    turn(pool, 3, parent[:3], 1, told("b", parent="a"))
    assert turn(pool, 4, parent, 1, told("a"))[:4] == parent
    assert pool.named.branch_of(("", "a")) != pool.named.branch_of(("", "b"))


def test_a_session_that_awaits_another_is_used_with_it() -> None:
    pool = make(10)
    parent = turn(pool, 1, [], 3, told("a"))
    other = turn(pool, 2, [], 3)
    turn(pool, 3, [], 2, told("b", parent="a", ttl_s=0.0))
    order = free(pool)
    assert order.index(other[0]) < order.index(parent[2])


@pytest.mark.parametrize("salt", ["", "red"])
def test_a_name_counts_within_its_salt(salt: str) -> None:
    pool = make(12)
    turn(pool, 1, [], 3, ToldSession.of(SessionHint("a"), "", salt))
    pool.end(("blue", "a"))
    assert pool.num_kept == 3
    pool.end((salt, "a"))
    assert pool.num_kept == 0


def test_names_are_forgotten_with_the_blocks() -> None:
    pool = make(9)
    for number in range(1000):
        turn(pool, number, [], 2, told(f"session {number}", ttl_s=HOUR_S))
        assert len(pool.named) <= 4
    assert len(pool._ages._ends) <= 2 * len(pool._branches) + 65
    assert len(pool._ages._num_pinned) <= 1


# --- times ---------------------------------------------------------------------------------------


def test_a_shorter_time_ends_what_would_be_kept() -> None:
    pool = make(10)
    turn(pool, 1, [], 3, told(ttl_s=1.0))
    turn(pool, 2, [], 3)
    age(pool, 2.0)
    assert pool.num_kept == 3
    age(pool, 2 * pool.gaps.horizon_s)
    assert pool.num_kept == 0


def test_a_longer_time_keeps_what_would_be_let_go_and_no_longer() -> None:
    pool = make(13)
    pinned = turn(pool, 1, [], 3, told(ttl_s=HOUR_S))
    plain = turn(pool, 2, [], 3)
    pool.expect(3, [], 10 * SIZE)
    age(pool, 60.0)
    assert pool.num_kept == 3 and not pool.may_enter(3)
    assert pool.take(9)[-3:] == plain[::-1]
    age(pool, HOUR_S)
    assert pool.num_kept == 0
    assert pool.take(3) == pinned[::-1]


def test_a_pin_yields_to_a_turn_that_has_come_and_before_what_is_kept_anyway() -> None:
    pool = make(13)
    pinned = turn(pool, 1, [], 6, told(ttl_s=HOUR_S))
    age(pool, 60.0)
    fresh = turn(pool, 2, [], 6)
    pool.expect(3, [], 7 * SIZE)
    assert not pool.may_enter(3)
    pool.work = PATIENCE * 7 * SIZE
    assert pool.may_enter(3)
    assert pool.take(7) == [*reversed(pinned), fresh[-1]]


def test_a_flood_of_hints_holds_no_more_than_a_share_and_none_of_another_tenant() -> None:
    pool = make(101)
    for number in range(40):  # a tenant that wants all of it for an hour
        turn(pool, number, [], 2, told(f"f{number}", ttl_s=HOUR_S, of="flood"))
    age(pool, 60.0)
    assert pool.num_kept == 50, "half of the pool at most"
    turn(pool, 100, [], 20, told("mine", ttl_s=HOUR_S, of="other"))
    age(pool, 120.0)
    assert pool.num_kept == 50 + 20, "the other tenant's hint is kept, too"
    for number in range(200, 300):
        turn(pool, number, [], 2, told(f"f{number}", ttl_s=HOUR_S, of="flood"))
        if number % 10 == 0:
            pool.now_s += 60.0
            pool.let_age()
            assert pool.num_kept <= pool.num_blocks // 2 + 20 + 20
    mine = pool._branches[pool.named.branch_of(("", "mine"))]
    assert mine.num_blocks == 20, "the flood took what another tenant keeps"


def test_a_second_tenant_halves_the_share_of_the_first() -> None:
    pool = make(101)
    turn(pool, 0, [], 10, told(ttl_s=HOUR_S, of="one"))
    for number in range(1, 30):
        turn(pool, number, [], 2, told(ttl_s=HOUR_S, of="two"))
    age(pool, 60.0)
    assert pool.num_kept == 10 + 24, "25 blocks are a quarter of the pool"


# --- the whole core ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_a_newcomer_enters_although_all_that_there_is_is_pinned(policy: CachePolicy) -> None:
    scheduler = make_scheduler(
        blocks=24, block_size=SIZE, max_num_seqs=2, max_model_len=64, cache_policy=policy
    )
    for number in range(8):
        hint = SessionHint(f"s{number}", ttl_s=1e9)
        prompt = range(100 * number, 100 * number + 12)
        scheduler.add(make_request(f"{number}", prompt, max_tokens=1, session=hint, tenant="flood"))
        step(scheduler)
    scheduler.now_s = 100.0
    scheduler.add(make_request("runs", 3, max_tokens=40, skip_prefix_cache=True))
    new = scheduler.add(make_request("new", range(900, 930), max_tokens=1, tenant="other"))
    num_steps = 0
    while not new.has_run:
        step(scheduler)
        num_steps += 1
    assert num_steps <= 40


def test_lru_ignores_hints() -> None:
    plans = []
    for hint in (None, SessionHint("a", "b", 0.0)):
        scheduler = make_scheduler(blocks=12, block_size=SIZE, max_model_len=64)
        for number in range(12):
            prompt = range(100 * (number % 4), 100 * (number % 4) + 14)
            scheduler.add(make_request(f"{number}", prompt, max_tokens=2, session=hint))
            step(scheduler)
        scheduler.end_session("a")
        plans.append((scheduler.counters.num_prefill_tokens, scheduler.view.num_evictions))
    assert plans[0] == plans[1]
