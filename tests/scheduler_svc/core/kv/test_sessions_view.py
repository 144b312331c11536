"""Sessions as operators see them: turns, tokens, what was found, and in which state they are."""

from scheduler_svc.core import CachePolicy, Scheduler, SessionHint
from scheduler_svc.explain.explain import explain, find_life
from scheduler_svc.explain.trace import Trace
from tests.scheduler_svc.core.builders import make_request, make_scheduler, step

SIZE = 4
HOUR_S = 3600.0


def by_sessions(**limits: object) -> Scheduler:
    return make_scheduler(block_size=SIZE, cache_policy=CachePolicy.SESSIONS, **limits)


def turn(scheduler: Scheduler, request_id: str, tokens: list[int], hint: SessionHint) -> None:
    request = make_request(request_id, tokens, max_tokens=1, session=hint, tenant="t")
    scheduler.add(request)
    step(scheduler)


def test_a_session_is_shown_with_its_turns_and_what_they_found() -> None:
    scheduler = by_sessions(blocks=40, max_model_len=128)
    tokens = [*range(100, 124)]
    for number in range(3):
        scheduler.now_s = 10.0 * number
        turn(scheduler, f"a{number}", [*tokens, *range(200, 200 + 8 * number)], SessionHint("a"))
    scheduler.now_s = 25.0
    turn(scheduler, "b", [*range(300, 317)], SessionHint(ttl_s=HOUR_S))
    scheduler.now_s = 26.0
    newest, older = scheduler.view.sessions.latest(5)
    assert (newest.session_id, newest.num_turns, newest.num_found_tokens) == ("", 1, 0)
    assert (older.session_id, older.tenant, older.num_turns, older.idle_s) == ("a", "t", 3, 6.0)
    assert older.num_prompt_tokens == 24 + 32 + 40
    assert older.num_found_tokens == 24 + 32
    assert older.num_cached_tokens == 40
    assert {newest.state, older.state} == {"kept"}
    assert scheduler.view.sessions.latest(1) == [newest]
    assert len(scheduler.view.sessions) == 2


def test_states_of_sessions() -> None:
    scheduler = by_sessions(blocks=40, max_model_len=64, max_num_seqs=1)
    turn(scheduler, "kept", [*range(100, 117)], SessionHint("kept", ttl_s=HOUR_S))
    turn(scheduler, "gone", [*range(200, 217)], SessionHint("gone"))
    scheduler.now_s = 60.0
    scheduler.add(make_request("runs", 9, max_tokens=5, session=SessionHint("runs")))
    step(scheduler)
    waits = make_request("waits", range(200, 220), max_tokens=1, session=SessionHint("gone"))
    scheduler.add(waits)
    states = {one.session_id: one.state for one in scheduler.view.sessions.latest(9)}
    assert states == {"runs": "runs", "gone": "waits", "kept": "kept by hint"}
    scheduler.abort("waits")
    scheduler.now_s = 2 * HOUR_S
    scheduler.add(make_request("other", 3, max_tokens=1))
    step(scheduler)
    states = {one.session_id: one.state for one in scheduler.view.sessions.latest(9)}
    assert states == {"runs": "runs", "gone": "not kept", "kept": "not kept"}


def test_it_is_told_what_a_waiting_turn_lost_to_others() -> None:
    scheduler = by_sessions(blocks=12, max_model_len=64, max_num_seqs=2)
    known = [*range(100, 124)]
    turn(scheduler, "first", known, SessionHint("a"))
    scheduler.add(make_request("runs", 9, max_tokens=30, skip_prefix_cache=True))
    step(scheduler)
    scheduler.add(make_request("other", range(300, 325), max_tokens=1))
    waits = scheduler.add(make_request("next", [*known, 7], max_tokens=1))
    pool = scheduler.internal_state.pool
    pool.release(pool.take(9))  # as if others had taken all that is free
    while not waits.has_run:
        step(scheduler)
    life = find_life(scheduler, "next", 1.0)
    assert life is not None
    assert "computed 24 prompt tokens anew" in explain(life, 2, Trace()).summary
    assert scheduler.view.num_awaited_evicted == 6
    first = find_life(scheduler, "first", 1.0)
    assert first is not None and "anew" not in explain(first, 2, Trace()).summary
    scheduler.worker_lost()
    assert scheduler.view.num_awaited_evicted == 6, "a counter went down"
