"""The content of a step: rows, chunks, their order and their blocks."""

import numpy as np
import pytest

from tests.scheduler_svc.core.builders import (
    answer,
    make_request,
    make_scheduler,
    plan_step,
    rows,
    step,
)


def test_nothing_to_do_is_no_plan() -> None:
    assert make_scheduler().schedule() is None


def test_prompts_and_decodes_share_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    step(scheduler)
    scheduler.add(make_request("b", range(100, 107)))
    assert rows(plan_step(scheduler)) == {"a": 1, "b": 7}


def test_an_arrival_in_every_step_does_not_starve_the_decodes() -> None:
    scheduler = make_scheduler(max_num_seqs=32, max_num_batched_tokens=32, blocks=200)
    scheduler.add(make_request("a", 4))
    step(scheduler)
    for number in range(20):
        scheduler.add(make_request(f"late{number}", range(50 * number, 50 * number + 30)))
        plan = plan_step(scheduler)
        assert rows(plan)["a"] == 1
        answer(scheduler, *[500] * len(plan.sampled_slots))


def test_rows_that_decode_wait_for_no_more_prompt_tokens_than_the_caller_lets_in() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    step(scheduler)
    scheduler.add(make_request("b", range(100, 120)))
    scheduler.add(make_request("c", range(200, 206)))
    for chunk in (8, 8):
        plan = scheduler.schedule(8)
        assert plan is not None and rows(plan) == {"a": 1, "b": chunk}
        answer(scheduler, 500)
    assert scheduler.counters.num_capped_steps == 2
    plan = scheduler.schedule(8)
    assert plan is not None and rows(plan) == {"a": 1, "b": 4, "c": 4}
    answer(scheduler, 500, 500)
    plan = scheduler.schedule(8)
    assert plan is not None and rows(plan) == {"a": 1, "b": 1, "c": 2}
    assert scheduler.counters.num_capped_steps == 3, "the last one held nothing back"


def test_prompts_alone_have_the_whole_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 20))
    plan = scheduler.schedule(8)
    assert plan is not None and rows(plan) == {"a": 20}
    assert not scheduler.counters.num_capped_steps


def test_a_prompt_above_the_budget_goes_in_chunks_and_samples_with_the_last() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 20))
    seen = []
    for _ in range(4):
        plan = plan_step(scheduler)
        seen.append((rows(plan)["a"], len(plan.sampled_slots)))
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert seen == [(8, 0), (8, 0), (4, 1), (1, 1)]


def test_a_long_prompt_is_cut_to_the_threshold() -> None:
    scheduler = make_scheduler(
        long_prefill_token_threshold=256,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        blocks=300,
    )
    scheduler.add(make_request("a", [7] * 1000, max_tokens=1))
    seen: list[int] = []
    while scheduler.find("a"):
        plan = plan_step(scheduler)
        seen += rows(plan).values()
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert seen == [256, 256, 256, 232]


@pytest.mark.parametrize(("budget", "expected"), [(4, {"a": 1, "b": 3}), (2, {"a": 1, "b": 1})])
def test_decodes_get_their_token_before_prompts_get_the_rest(
    budget: int, expected: dict[str, int]
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=budget, max_num_seqs=2)
    scheduler.add(make_request("a", 1))
    step(scheduler)
    scheduler.add(make_request("b", range(100, 120)))
    assert rows(plan_step(scheduler)) == expected


def test_the_budget_goes_to_prompts_in_order_of_admission() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=5)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        scheduler.add(make_request(name, range(first, first + 12)))
    seen = []
    for _ in range(3):
        plan = plan_step(scheduler)
        seen.append(rows(plan))
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert seen[0] == {"a": 5, "b": 5}
    assert seen[1] == {"a": 5, "b": 5}
    assert seen[2] == {"a": 2, "b": 2, "c": 5}  # a and b finish their prompts, c is admitted


def test_no_more_sequences_run_than_there_are_slots() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abcde":
        scheduler.add(make_request(name, 2, max_tokens=3))
    for _ in range(12):
        plan = scheduler.schedule()
        if plan is not None:
            assert len(plan.slots) <= 2 and scheduler.num_running <= 2
            answer(scheduler, *[500] * len(plan.sampled_slots))
    assert scheduler.num_finished == 5


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 8, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("b", 8, max_tokens=1))
    plan = plan_step(scheduler)
    assert rows(plan) == {"b": 4}
    assert plan.new_sequences[0].num_computed_tokens == 4
    assert plan.sampled_slots.tolist() == plan.slots.tolist()


def test_cached_blocks_do_not_count_as_needed_when_somebody_holds_them() -> None:
    scheduler = make_scheduler(blocks=6)
    scheduler.add(make_request("a", 17, max_tokens=4))  # five blocks
    step(scheduler)
    scheduler.add(make_request("b", 17, max_tokens=4))  # shares four of them, one is free
    assert rows(plan_step(scheduler)) == {"a": 1, "b": 1}


def test_cached_blocks_that_nobody_holds_count_as_needed() -> None:
    """Sharing takes them out of the free queue: four shared and one new do not fit into four."""
    scheduler = make_scheduler(blocks=6)
    scheduler.add(make_request("a", 17, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("c", range(100, 108), max_tokens=8))
    step(scheduler)
    assert scheduler.internal_state.pool.num_free == 4
    free_before = list(scheduler.internal_state.pool.free_queue())
    scheduler.add(make_request("b", 17, max_tokens=4))
    assert "b" not in rows(plan_step(scheduler))
    answer(scheduler, 500)
    left = [b for b in free_before if scheduler.internal_state.pool.ref_count(b) == 0]
    assert list(scheduler.internal_state.pool.free_queue()) == left, "a refusal moved blocks"


def test_the_queue_waits_for_its_head() -> None:
    scheduler = make_scheduler(blocks=4, queue_window=0)
    scheduler.add(make_request("a", 8, max_tokens=4))
    step(scheduler)
    scheduler.add(make_request("big", range(100, 112), max_tokens=4))
    scheduler.add(make_request("small", range(200, 202), max_tokens=2))
    assert rows(plan_step(scheduler)) == {"a": 1}
    assert [s.request.request_id for s in scheduler.internal_state.waiting] == ["big", "small"]


def test_a_blocked_head_is_not_looked_up_again_until_blocks_come_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(blocks=6)
    scheduler.add(make_request("a", 12, max_tokens=4))
    step(scheduler)
    scheduler.add(make_request("big", range(100, 120), max_tokens=4))
    lookups = []
    cache = scheduler.internal_state.pool.cache
    original = cache.lookup

    def counted(hashes: list[int], *rest: object) -> list[int]:
        lookups.append(len(hashes))
        return original(hashes, *rest)

    monkeypatch.setattr(cache, "lookup", counted)
    for _ in range(3):
        step(scheduler)
    assert len(lookups) == 1 and not scheduler.find("a")
    assert rows(plan_step(scheduler)) == {"big": 20}


def test_equal_prompts_of_one_step_share_their_blocks() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, 9))
    plan = plan_step(scheduler)
    assert rows(plan) == {"a": 9, "b": 1, "c": 1}
    tables = [new.block_ids for new in plan.new_sequences]
    assert tables == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]


def test_nothing_is_shared_when_prefix_caching_is_off() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_request(name, 9))
    assert rows(plan_step(scheduler)) == {"a": 9, "b": 9}
    assert len(scheduler.internal_state.pool.cache) == 0


def test_the_newest_gives_way_and_whoever_waits_does_not_overtake_it() -> None:
    scheduler = make_scheduler(blocks=4)
    for name, first in (("a", 100), ("b", 200)):
        scheduler.add(make_request(name, range(first, first + 8), max_tokens=8))
    scheduler.add(make_request("c", 1, max_tokens=1))
    step(scheduler)
    plan = plan_step(scheduler)
    assert rows(plan) == {"a": 1}
    assert plan.preempted == ["b"]
    assert [s.request.request_id for s in scheduler.internal_state.waiting] == ["b", "c"]


def test_a_victim_does_not_come_back_in_the_step_that_sent_it_away() -> None:
    """Its first chunk alone would fit, and the next step would preempt it again."""
    scheduler = make_scheduler(
        blocks=4, long_prefill_token_threshold=4, enable_prefix_caching=False
    )
    for name, first in (("a", 100), ("b", 200)):
        scheduler.add(make_request(name, range(first, first + 8), max_tokens=8))
    step(scheduler)
    step(scheduler)
    plan = plan_step(scheduler)
    assert (rows(plan), plan.preempted) == ({"a": 1}, ["b"])


def test_a_victim_that_nobody_computes_beside_is_reported_with_the_next_plan() -> None:
    scheduler = make_scheduler(blocks=4)
    for name, first in (("a", 100), ("b", 200)):
        scheduler.add(make_request(name, range(first, first + 8), max_tokens=8))
    plan_step(scheduler)
    assert scheduler.schedule() is None  # a waits for b's blocks, which the step still holds
    answer(scheduler, 500, 500)
    assert plan_step(scheduler).preempted == ["b"]


def test_the_worker_hears_of_a_freed_slot_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, max_tokens=1))
    scheduler.add(make_request("b", range(50, 54), max_tokens=3))
    step(scheduler)
    assert plan_step(scheduler).freed_slots == [0]
    answer(scheduler, 500)
    assert plan_step(scheduler).freed_slots == []


def test_only_an_unchanged_decode_step_is_called_the_same_rows() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", range(50, 54), max_tokens=3))
    seen = []
    for _ in range(5):
        plan = plan_step(scheduler)
        seen.append(plan.same_rows)
        answer(scheduler, *[500] * len(plan.sampled_slots))
    # The prompts, the first decodes, the same, after b has left, the same.
    assert seen == [False, False, True, False, True]


def test_a_row_that_has_its_last_token_coming_sits_out() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, max_tokens=1))
    scheduler.add(make_request("b", range(50, 54)))
    plan_step(scheduler)
    assert rows(plan_step(scheduler)) == {"b": 1}


def test_a_plan_names_its_rows_even_after_they_have_left() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, 5))
    plan = plan_step(scheduler)
    scheduler.abort("a")
    scheduler.worker_lost()
    assert [s.request.request_id for s in plan.sequences()] == ["a", "b"]


def test_counters_tell_cached_from_computed() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, 9, max_tokens=1))
        step(scheduler)
    counters = scheduler.counters
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (18, 8)
    assert (counters.num_steps, counters.num_prefill_tokens) == (2, 10)


def test_positions_before_the_step_are_told() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 12))
    seen = []
    for _ in range(3):
        plan = plan_step(scheduler)
        seen.append(plan.num_computed.tolist())
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert seen == [[0], [8], [12]]
    assert plan.num_computed.dtype == plan.slots.dtype == np.int32
