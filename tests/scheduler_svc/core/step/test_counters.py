"""Counters tell an operator what happened, and never go down."""

import pytest

from scheduler_svc.core import Scheduler, StepResult
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.request.config import Preemption
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


def crowd(**limits: object) -> Scheduler:
    """Two requests that grow until one of them has to give way."""
    scheduler = make_scheduler(blocks=6, max_num_seqs=2, **limits)
    for name, first in (("a", 100), ("b", 200)):
        scheduler.add(make_request(name, range(first, first + 9), max_tokens=10))
    return scheduler


def test_a_preempted_request_is_a_gauge_and_its_hits_are_counted_apart() -> None:
    scheduler = crowd()
    before, most = scheduler.counters.prefix_query_tokens, 0
    while scheduler.num_running or scheduler.num_waiting:
        step(scheduler)
        check_invariants(scheduler)
        most = max(most, scheduler.view.num_preempted)
        assert scheduler.view.num_preempted <= scheduler.num_waiting
    counters = scheduler.counters
    assert (scheduler.view.num_preemptions, most, scheduler.view.num_preempted) == (1, 1, 0)
    assert counters.prefix_query_tokens - before == 2 * 9, "a return is no first lookup"
    assert counters.returned_query_tokens > 9, "its output is looked up, too"
    assert 0 <= counters.returned_hit_tokens < counters.returned_query_tokens


def test_a_preempted_request_that_is_aborted_leaves_the_gauge() -> None:
    scheduler = crowd()
    while not scheduler.view.num_preempted:
        step(scheduler)
    (waiting,) = scheduler.view.waiting
    scheduler.abort(waiting.request.request_id)
    assert scheduler.view.num_preempted == scheduler.num_waiting == 0
    check_invariants(scheduler)


@pytest.mark.parametrize("ends_early", [False, True])
def test_what_was_swapped_out_came_back_is_there_or_was_dropped(ends_early: bool) -> None:
    scheduler = crowd(preemption=Preemption.SWAP, num_host_blocks=8)
    view = scheduler.view
    while scheduler.num_running or scheduler.num_waiting:
        step(scheduler)
        held = view.num_host_blocks - view.num_free_host_blocks
        assert view.num_swapped_out == view.num_swapped_in + held + view.num_swapped_dropped
        if ends_early and held:
            assert view.num_swapped_dropped == 0
            (waiting,) = view.waiting
            scheduler.abort(waiting.request.request_id)
            assert view.num_swapped_dropped == held
    assert view.num_swapped_out > 0
    assert bool(view.num_swapped_in) is not ends_early
    assert scheduler.counters.returned_query_tokens == 0, "its KV was on the host"


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
