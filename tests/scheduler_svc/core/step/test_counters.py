"""Counters tell an operator what happened, and never go down."""

from scheduler_svc.core import StepResult
from scheduler_svc.core.invariants import check_invariants
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler, step


def test_a_request_that_opted_out_is_no_lookup_in_the_prefix_cache() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9, max_tokens=1, skip_prefix_cache=True))
    step(scheduler)
    assert scheduler.counters.prefix_query_tokens == 0
    scheduler.add(make_request("b", 9, max_tokens=1))
    step(scheduler)
    assert scheduler.counters.prefix_query_tokens == 9


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(make_request("a", 9, max_tokens=1))
    step(scheduler)
    assert scheduler.counters.prefix_query_tokens == 0


def test_a_last_chunk_of_one_token_is_prefill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 9, max_tokens=3))
    step(scheduler)
    assert scheduler.counters.num_prefill_tokens == 8
    step(scheduler)
    assert scheduler.counters.num_prefill_tokens == 9
    step(scheduler)
    step(scheduler)
    assert scheduler.counters.num_prefill_tokens == 9, "decodes are no prefill"


def test_a_prompt_of_one_token_is_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 1, max_tokens=3))
    step(scheduler)
    step(scheduler)
    assert scheduler.counters.num_prefill_tokens == 1


def test_a_decode_planned_before_the_first_token_is_known_is_no_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=4))
    for _ in range(3):
        assert scheduler.schedule() is not None
    assert scheduler.counters.num_prefill_tokens == 5
    for _ in range(3):
        answer(scheduler, 500)
    assert scheduler.counters.num_prefill_tokens == 5


def test_a_cut_takes_no_step_from_the_count() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=20))
    step(scheduler)
    before = scheduler.counters.num_steps
    steps = scheduler.grant(4)
    assert len(steps) == 4
    seen = [scheduler.counters.num_steps]
    answer(scheduler, 500)
    seen.append(scheduler.counters.num_steps)
    scheduler.add(make_request("b", 5))
    cut = scheduler.cut()
    assert cut is not None
    seen.append(scheduler.counters.num_steps)
    assert scheduler.skip(steps[2].step_id, cut.last_step_id) == 2
    seen.append(scheduler.counters.num_steps)
    answer(scheduler, 500)
    seen.append(scheduler.counters.num_steps)
    assert seen == sorted(seen), "a counter went down"
    assert seen[-1] == before + 2


def test_granted_steps_of_a_lost_worker_were_planned() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=20))
    step(scheduler)
    before = scheduler.counters.num_steps
    scheduler.grant(4)
    scheduler.worker_lost()
    assert scheduler.counters.num_steps == before + 4


def test_an_idle_worker_is_told_that_the_last_sequence_has_left() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=1))
    assert scheduler.release() is None, "it runs"
    assert step(scheduler).finished
    assert scheduler.schedule() is None
    plan = scheduler.release()
    assert plan is not None and plan.freed_slots == [0] and not len(plan.slots)
    assert scheduler.release() is None, "one is in flight"
    assert not scheduler.update(StepResult(plan.step_id, plan.sampled_slots)).finished
    assert scheduler.release() is None, "the worker knows"
    check_invariants(scheduler)
    scheduler.add(make_request("b", 5, max_tokens=1))
    assert step(scheduler).finished


def test_a_release_lost_with_its_worker_is_of_no_consequence() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=1))
    step(scheduler)
    assert scheduler.release() is not None
    scheduler.worker_lost()
    scheduler.worker_back()
    assert scheduler.release() is None
    check_invariants(scheduler)
