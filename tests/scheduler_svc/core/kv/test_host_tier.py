"""A sequence whose prompt a tier holds further than the device waits for the rest."""

from typing import Any

import pytest

from scheduler_svc.core import (
    Cause,
    FinishReason,
    Phase,
    Scheduler,
    Status,
    TransferOrders,
)
from scheduler_svc.core.kv.transfers import MAX_REPEATS
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler, plan_step, rows

PRIVATE: dict[str, Any] = {"max_tokens": 1, "skip_prefix_cache": True}
PROMPT = 41  # ten blocks of four tokens, and one token


def tiered(**limits: Any) -> Scheduler:
    return make_scheduler(**({"blocks": 16, "num_tier_blocks": 64} | limits))


def orders_of(scheduler: Scheduler, s_per_block: float = 0.0) -> TransferOrders:
    orders = scheduler.transfers.take_transfers(s_per_block)
    assert orders is not None
    return orders


def run(scheduler: Scheduler, name: str, prompt: object, max_tokens: int = 1) -> None:
    """Computes a request alone, and stores what it leaves."""
    scheduler.add(make_request(name, prompt, max_tokens=max_tokens))  # type: ignore[arg-type]
    while scheduler.find(name) is not None:
        answer(scheduler, *[500] * len(plan_step(scheduler).sampled_slots))
        store(scheduler)


def store(scheduler: Scheduler) -> None:
    if (orders := scheduler.transfers.take_transfers()) is not None:
        for one in orders.stores:
            scheduler.transfers.transfer_done(one.transfer_id, len(one.block_ids))


def dropped_from_the_device(**limits: Any) -> Scheduler:
    """A scheduler whose tier holds eight blocks of PROMPT, and whose device none of it."""
    scheduler = tiered(long_prefill_token_threshold=16, **limits)
    run(scheduler, "first", PROMPT)
    for number in range(2):
        run(scheduler, f"other {number}", range(100 + 50 * number, 150 + 50 * number))
    assert scheduler.transfers.num_held_tier_blocks >= 10
    return scheduler


def test_prompt_blocks_are_stored_once_their_step_is_answered() -> None:
    scheduler = tiered()
    scheduler.add(make_request("a", 14, max_tokens=9))
    plan_step(scheduler)
    assert scheduler.transfers.take_transfers() is None, "the device may not be done with them"
    answer(scheduler, 500)
    (one,) = orders_of(scheduler).stores
    assert len(one.block_ids) == len(one.tier_blocks) == len(one.keys) == 3
    for _ in range(7):
        plan_step(scheduler)
        answer(scheduler, 500)
    assert scheduler.transfers.take_transfers() is None, "its answer has not ended"


def test_an_answer_is_stored_when_it_ends_and_the_next_turn_finds_it() -> None:
    scheduler = tiered()
    run(scheduler, "a", 14, max_tokens=12)  # 26 tokens, the last one without KV: six blocks
    assert scheduler.transfers.num_held_tier_blocks == 6
    for number in range(2):
        run(scheduler, f"other {number}", range(100 + 50 * number, 150 + 50 * number))
    turn = [*range(1, 15), *[500] * 12, 7, 8, 9]
    scheduler.add(make_request("next", turn, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler).fetches
    assert len(one.keys) == 6


def test_what_others_took_before_it_could_enter_is_copied_again_and_not_computed() -> None:
    scheduler = dropped_from_the_device()
    pool = scheduler.internal_state.pool
    scheduler.add(make_request("back", PROMPT, max_tokens=1))
    num_fetches = 0
    while scheduler.schedule() is None:
        (one,) = orders_of(scheduler).fetches
        num_fetches += 1
        scheduler.transfers.transfer_done(one.transfer_id, len(one.keys))
        if num_fetches == 3:
            break
        pool.release(pool.take(pool.num_free))  # others compute in them, and end
    assert plan_step(scheduler).num_computed.tolist() == [40]


def test_what_is_taken_each_time_is_computed_in_the_end() -> None:
    scheduler = dropped_from_the_device()
    pool = scheduler.internal_state.pool
    scheduler.add(make_request("back", PROMPT, max_tokens=1))
    num_fetches = 0
    while (plan := scheduler.schedule()) is None:
        (one,) = orders_of(scheduler).fetches
        num_fetches += 1
        scheduler.transfers.transfer_done(one.transfer_id, len(one.keys))
        pool.release(pool.take(pool.num_free))
    assert num_fetches == MAX_REPEATS + 1 and plan.num_computed.tolist() == [0]


def test_what_is_stored_is_held_until_the_answer_and_found_only_then() -> None:
    scheduler = tiered()
    scheduler.add(make_request("a", 14, max_tokens=1))
    plan_step(scheduler)
    answer(scheduler, 500)
    pool = scheduler.internal_state.pool
    (one,) = orders_of(scheduler).stores
    assert pool.num_free == pool.num_usable - 3 and not scheduler.transfers.num_held_tier_blocks
    scheduler.transfers.transfer_done(one.transfer_id, 2)
    assert pool.num_free == pool.num_usable and scheduler.transfers.num_held_tier_blocks == 2
    counts = scheduler.transfers.counts
    assert (counts.num_stored, counts.num_not_stored) == (2, 1)


def test_a_prompt_of_the_tier_waits_without_budget_and_computes_the_rest() -> None:
    scheduler = dropped_from_the_device()
    sequence = scheduler.add(make_request("back", PROMPT, max_tokens=1))
    scheduler.add(make_request("beside", range(700, 705), max_tokens=1))
    plan = plan_step(scheduler)
    assert rows(plan) == {"beside": 5}
    assert sequence.status is Status.WAITING_FOR_KV and scheduler.num_waiting == 1
    assert sequence.timeline.phase is Phase.KV
    (one,) = orders_of(scheduler).fetches
    assert len(one.block_ids) == 10
    answer(scheduler, 500)
    assert scheduler.schedule() is None, "it waits"
    scheduler.transfers.transfer_done(one.transfer_id, 10)
    assert rows(plan_step(scheduler)) == {"back": 1}
    (finished,) = answer(scheduler, 500).finished
    assert finished.num_cached_tokens == 40
    assert scheduler.transfers.counts.num_fetched == 10


@pytest.mark.parametrize("num_whole", [0, 1, 9, 10, 2**32 - 1])
def test_the_blocks_that_came_count_and_the_others_are_computed(num_whole: int) -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("back", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler).fetches
    scheduler.transfers.transfer_done(one.transfer_id, num_whole)
    scheduler.transfers.transfer_done(one.transfer_id, 10)  # a second answer is void
    plan = plan_step(scheduler)
    assert plan.num_computed.tolist() == [4 * min(num_whole, 10)], "it does not wait again"
    assert scheduler.transfers.num_in_flight == 0


def test_a_fetch_that_is_late_is_cancelled_and_its_blocks_are_nobodys_until_the_answer() -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("back", 25, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler, s_per_block=0.25).fetches
    assert len(one.block_ids) == 6
    assert scheduler.next_deadline_s == pytest.approx(scheduler.now_s + 15.0)
    scheduler.expire(scheduler.now_s + 14.9)
    assert scheduler.schedule() is None
    scheduler.expire(scheduler.now_s + 0.2)
    plan = plan_step(scheduler)
    assert rows(plan) == {"back": 16} and scheduler.next_deadline_s is None
    assert not {*plan.new_sequences[0].block_ids} & {*one.block_ids}, "they are written still"
    assert orders_of(scheduler).cancelled_ids == (one.transfer_id,)
    free = scheduler.internal_state.pool.num_free
    scheduler.transfers.transfer_done(one.transfer_id, 6)
    assert scheduler.internal_state.pool.num_free == free + 6


def test_no_sequence_awaits_a_fetch_that_was_cancelled() -> None:
    """A worker that hangs would hold it for as long as that takes."""
    scheduler = dropped_from_the_device(blocks=40, num_tier_blocks=400)
    for first in range(300, 900, 70):
        run(scheduler, f"filler {first}", range(first, first + 60))
    scheduler.add(make_request("late", 25, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler).fetches
    scheduler.expire(scheduler.now_s + 1.1)
    second = scheduler.add(make_request("second", 25, max_tokens=1))
    plan_step(scheduler)
    orders = orders_of(scheduler)
    assert orders.cancelled_ids == (one.transfer_id,)
    assert second.status is Status.WAITING_FOR_KV
    (anew,) = orders.fetches
    assert not {*anew.block_ids} & {*one.block_ids}
    scheduler.transfers.transfer_done(anew.transfer_id, 6)
    assert second.status is Status.WAITING, "queued, though the first is not answered"
    scheduler.transfers.transfer_done(one.transfer_id, 0)


def test_an_abort_cancels_the_fetch_that_no_other_awaits() -> None:
    scheduler = dropped_from_the_device()
    for name in "ab":
        scheduler.add(make_request(name, PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler).fetches  # both await the same blocks
    end = scheduler.abort("a")
    assert end is not None and end.reason is FinishReason.ABORT
    assert scheduler.transfers.take_transfers() is None
    scheduler.abort("b")
    assert orders_of(scheduler).cancelled_ids == (one.transfer_id,)
    assert not scheduler.num_waiting


def test_a_fetch_that_was_never_sent_ends_with_its_sequence() -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    scheduler.abort("a")
    assert scheduler.transfers.take_transfers() is None and not scheduler.transfers.num_in_flight


def test_a_deadline_ends_one_that_waits_for_kv() -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("a", PROMPT, max_tokens=1, deadline_s=0.5))
    assert scheduler.schedule() is None
    (end,) = scheduler.expire(0.6)
    assert end.reason is FinishReason.EXPIRED


def test_a_lost_worker_ends_all_transfers_and_their_late_answers_are_void() -> None:
    scheduler = dropped_from_the_device()
    sequence = scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler).fetches
    scheduler.worker_lost()
    assert sequence.status is Status.WAITING and not scheduler.transfers.num_held_tier_blocks
    scheduler.transfers.transfer_done(one.transfer_id, 10)
    scheduler.worker_back()
    assert plan_step(scheduler).num_computed.tolist() == [0]


def test_a_worker_that_lives_has_what_its_tier_held_when_its_stream_was_lost() -> None:
    scheduler = dropped_from_the_device()
    held = scheduler.transfers.num_held_tier_blocks
    waits = scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    (lost,) = orders_of(scheduler).fetches
    scheduler.worker_lost(keeps_tier=True)
    assert waits.status is Status.WAITING
    scheduler.transfers.transfer_done(lost.transfer_id, 10)  # of the stream that has ended
    scheduler.worker_lost(num_blocks=scheduler.config.num_blocks, keeps_tier=True)
    scheduler.worker_back()
    assert scheduler.transfers.num_held_tier_blocks == held > 0
    assert scheduler.schedule() is None, "it computes what the tier holds"
    (again,) = orders_of(scheduler).fetches
    assert again.transfer_id > lost.transfer_id
    assert again.tier_blocks == lost.tier_blocks
    scheduler.transfers.transfer_done(again.transfer_id, len(again.keys))
    assert plan_step(scheduler).num_computed.tolist() == [len(again.keys) * 4]


def test_another_process_has_nothing_of_what_the_one_before_it_held() -> None:
    scheduler = dropped_from_the_device()
    scheduler.worker_lost(keeps_tier=True)
    scheduler.worker_lost()  # another incarnation has come
    scheduler.worker_back()
    assert not scheduler.transfers.num_held_tier_blocks


def test_what_was_on_its_way_to_the_tier_is_not_there_after_the_stream() -> None:
    scheduler = make_scheduler(blocks=60, num_tier_blocks=60)
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    plan_step(scheduler)
    answer(scheduler, 500)
    (store,) = orders_of(scheduler).stores
    scheduler.worker_lost(keeps_tier=True)
    scheduler.transfers.transfer_done(store.transfer_id, len(store.keys))
    assert not scheduler.transfers.num_held_tier_blocks
    transfers = scheduler.internal_state.transfers
    assert transfers is not None and transfers.tiers[0].pool.num_free == 60


def test_a_worker_without_a_tier_can_follow_one_that_had_it() -> None:
    scheduler = dropped_from_the_device()
    scheduler.worker_lost(num_tier_blocks=0)
    scheduler.worker_back()
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert plan_step(scheduler).num_computed.tolist() == [0]
    assert scheduler.transfers.take_transfers() is None


def test_a_reset_of_the_prefix_cache_empties_the_tier_and_voids_what_is_on_its_way() -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    (one,) = orders_of(scheduler).fetches
    scheduler.reset_prefix_cache()
    assert not scheduler.transfers.num_held_tier_blocks
    scheduler.transfers.transfer_done(one.transfer_id, 10)
    assert plan_step(scheduler).num_computed.tolist() == [0]


@pytest.mark.parametrize("other", [{"cache_salt": "red"}, {"adapter_id": "x"}])
def test_another_salt_or_adapter_finds_nothing(other: dict[str, str]) -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("a", PROMPT, max_tokens=1, **other))
    assert plan_step(scheduler).num_computed.tolist() == [0]


def test_who_opts_out_neither_fetches_nor_stores() -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("a", PROMPT, max_tokens=1, skip_prefix_cache=True))
    assert plan_step(scheduler).num_computed.tolist() == [0]
    answer(scheduler)
    assert scheduler.transfers.take_transfers() is None


def test_stores_hold_at_most_a_quarter_of_the_blocks_and_the_rest_is_counted() -> None:
    scheduler = tiered()
    scheduler.add(make_request("a", 60, max_tokens=1))
    plan_step(scheduler)
    answer(scheduler, 500)
    (one,) = orders_of(scheduler).stores
    assert len(one.block_ids) == 4 and scheduler.transfers.counts.num_not_stored == 11


def test_a_full_tier_drops_what_was_used_longest_ago() -> None:
    scheduler = tiered(num_tier_blocks=6)
    run(scheduler, "a", 13)
    run(scheduler, "b", range(100, 113))
    run(scheduler, "a again", 13)  # found on the device: it is used in the tier, too
    run(scheduler, "c", range(200, 213))
    for number in range(2):  # drop all of it from the device, and store nothing
        begin = 300 + 60 * number
        scheduler.add(make_request(f"d{number}", range(begin, begin + 60), **PRIVATE))
        plan_step(scheduler)
        answer(scheduler, 500)
    found = {}
    for name, first in {"a": 1, "b": 100, "c": 200}.items():
        scheduler.add(make_request(name, range(first, first + 13), max_tokens=1))
        plan = scheduler.schedule()
        found[name] = plan is None
        scheduler.abort(name)
    assert found == {"a": True, "b": False, "c": True}


def test_why_all_that_wait_are_held_is_said() -> None:
    scheduler = dropped_from_the_device()
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    scheduler.add(make_request("b", range(700, 705), max_tokens=3))
    plan = plan_step(scheduler)
    assert plan.hold is not None and plan.hold.cause is Cause.KV
