"""Contents of a disk outlive the worker: they are found by key, and voided by a reset."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core import Scheduler, Status
from scheduler_svc.core.kv.chain import Chain, Keys
from scheduler_svc.core.kv.tier import TierName
from scheduler_svc.core.kv.transfers import TransferOrders
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler, plan_step, rows

PROMPT = 41  # ten blocks of four tokens, and one token


def with_disk(**limits: Any) -> Scheduler:
    return make_scheduler(**({"blocks": 200, "num_disk_blocks": 64} | limits))


def orders_of(scheduler: Scheduler) -> TransferOrders:
    orders = scheduler.transfers.take_transfers()
    assert orders is not None
    return orders


def run(scheduler: Scheduler, name: str, prompt: object) -> None:
    scheduler.add(make_request(name, prompt, max_tokens=1))  # type: ignore[arg-type]
    while scheduler.find(name) is not None:
        answer(scheduler, *[500] * len(plan_step(scheduler).sampled_slots))
        if (orders := scheduler.transfers.take_transfers()) is not None:
            for one in orders.stores:
                scheduler.transfers.transfer_done(one.transfer_id, len(one.block_ids))


def keys_of(prompt: object, **fields: Any) -> Keys:
    """The keys of a prompt's blocks, as another scheduler names them."""
    sequence = make_scheduler().add(make_request("a", prompt, **fields))  # type: ignore[arg-type]
    return Chain.of(sequence, 0, len(sequence.token_ids) // 4, 4).keys


def test_another_scheduler_finds_what_another_worker_stored() -> None:
    first = with_disk()
    run(first, "a", PROMPT)
    assert first.transfers.num_held_disk_blocks == 10
    second = with_disk()
    second.transfers.hear_disk(keys_of(PROMPT))
    waits = second.add(make_request("b", PROMPT, max_tokens=1))
    assert second.schedule() is None and waits.status is Status.WAITING_FOR_KV
    (one,) = orders_of(second).fetches
    assert one.tier is TierName.DISK and len(one.contents) == len(one.block_ids) == 10
    parent, tokens = one.contents[1][:8], np.frombuffer(one.contents[1][8:], dtype="<i4")
    assert int.from_bytes(parent, "little") == int(one.keys[0, 0])
    assert tokens.tolist() == waits.token_ids[4:8].tolist()
    second.transfers.transfer_done(one.transfer_id, 10)
    assert rows(plan_step(second)) == {"b": 1}
    assert second.transfers.disk_counts.num_fetched == 10


@pytest.mark.parametrize("other", [{"cache_salt": "red"}, {"adapter_id": "x"}])
def test_another_salt_or_adapter_finds_nothing(other: dict[str, str]) -> None:
    scheduler = with_disk()
    scheduler.transfers.hear_disk(keys_of(PROMPT))
    scheduler.add(make_request("a", PROMPT, max_tokens=1, **other))
    assert plan_step(scheduler).num_computed.tolist() == [0]


def test_a_key_whose_check_differs_is_not_found() -> None:
    keys = keys_of(PROMPT)
    keys[3, 1] ^= np.uint64(1)
    scheduler = with_disk()
    scheduler.transfers.hear_disk(keys)
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None
    assert len(orders_of(scheduler).fetches[0].keys) == 3


def test_host_memory_is_asked_first_and_the_disk_for_what_follows() -> None:
    scheduler = with_disk(blocks=16, num_tier_blocks=4)
    run(scheduler, "a", 17)  # four blocks in host memory
    for number in range(3):
        scheduler.add(
            make_request(f"{number}", range(200 + 50 * number, 250 + 50 * number), max_tokens=1)
        )
        while scheduler.find(f"{number}") is not None:
            answer(scheduler, *[500] * len(plan_step(scheduler).sampled_slots))
            for one in orders_of(scheduler).stores:
                scheduler.transfers.transfer_done(one.transfer_id, 0)
    assert scheduler.transfers.num_held_disk_blocks < 10
    scheduler.transfers.hear_disk(keys_of(PROMPT))
    waits, tiers = scheduler.add(make_request("b", PROMPT, max_tokens=1)), list[TierName]()
    while scheduler.schedule() is None:
        (one,) = orders_of(scheduler).fetches
        tiers.append(one.tier)
        scheduler.transfers.transfer_done(one.transfer_id, len(one.keys))
    assert TierName.DISK in tiers and tiers[-1] is TierName.DISK
    assert waits.num_cached == 40


def test_the_worker_is_told_what_to_drop_before_it_stores_more() -> None:
    scheduler = with_disk(num_disk_blocks=12)
    run(scheduler, "a", PROMPT)
    scheduler.add(make_request("b", range(100, 141), max_tokens=1))
    plan_step(scheduler)
    answer(scheduler, 500)
    orders = orders_of(scheduler)
    assert orders.drops is not None and not orders.drops.is_all
    # The ends of the prompt used longest ago go first.
    assert orders.drops.keys.tolist() == keys_of(PROMPT)[::-1][:8].tolist()
    assert len(orders.stores[0].keys) == 10


def test_what_is_told_beyond_the_room_is_dropped_the_oldest_first() -> None:
    scheduler = with_disk(num_disk_blocks=4)
    keys = np.arange(20, dtype=np.uint64).reshape(10, 2)
    scheduler.transfers.hear_disk(keys[:7])
    scheduler.transfers.hear_disk(keys[7:])
    assert scheduler.transfers.num_held_disk_blocks == 4
    drops = orders_of(scheduler).drops
    assert drops is not None and drops.keys.tolist() == keys[:6].tolist()
    scheduler.transfers.hear_disk(keys)  # once more, of which four are known
    assert scheduler.transfers.num_held_disk_blocks == 4


def test_a_reset_has_all_files_removed_and_nothing_told_before_is_believed() -> None:
    scheduler = with_disk()
    run(scheduler, "a", PROMPT)
    scheduler.reset_prefix_cache()
    assert not scheduler.transfers.num_held_disk_blocks
    drops = orders_of(scheduler).drops
    assert drops is not None and drops.is_all
    scheduler.transfers.hear_disk(keys_of(PROMPT))
    assert not scheduler.transfers.num_held_disk_blocks, "it was told before they were removed"
    run(scheduler, "b", PROMPT)
    assert scheduler.transfers.num_held_disk_blocks == 10, "the worker has shown that it did"
    scheduler.transfers.hear_disk(keys_of(range(100, 141)))
    assert scheduler.transfers.num_held_disk_blocks == 20


@pytest.mark.parametrize("keeps_tier", [True, False])
def test_a_worker_that_was_lost_before_it_removed_files_is_told_again(keeps_tier: bool) -> None:
    scheduler = with_disk()
    run(scheduler, "a", PROMPT)
    scheduler.reset_prefix_cache()
    orders_of(scheduler)
    scheduler.worker_lost(keeps_tier=True)
    scheduler.worker_lost(keeps_tier=keeps_tier)
    scheduler.worker_back()
    scheduler.transfers.hear_disk(keys_of(PROMPT))
    assert not scheduler.transfers.num_held_disk_blocks
    drops = orders_of(scheduler).drops
    assert drops is not None and drops.is_all


def test_what_was_to_be_stored_before_a_reset_is_not_sent_after_it() -> None:
    scheduler = with_disk()
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    plan_step(scheduler)
    answer(scheduler, 500)
    scheduler.reset_prefix_cache()
    orders = orders_of(scheduler)
    assert not orders.stores and orders.drops is not None and orders.drops.is_all


def test_a_worker_that_lives_keeps_the_order_of_use_and_another_one_is_asked() -> None:
    scheduler = with_disk()
    run(scheduler, "a", PROMPT)
    scheduler.worker_lost(keeps_tier=True)
    scheduler.worker_lost(keeps_tier=True)
    assert scheduler.transfers.num_held_disk_blocks == 10
    scheduler.worker_lost()
    assert scheduler.transfers.num_held_disk_blocks == 0
    scheduler.worker_lost(num_disk_blocks=7)
    scheduler.worker_back()
    assert scheduler.transfers.num_disk_blocks == 7


def test_a_disk_that_is_not_asked_is_written_still() -> None:
    scheduler = with_disk(blocks=16)
    scheduler.transfers.hear_disk(keys_of(PROMPT))
    scheduler.transfers.ask_disk(False)
    run(scheduler, "b", range(100, 141))
    assert scheduler.transfers.disk_counts.num_stored > 0
    scheduler.add(make_request("a", PROMPT, max_tokens=1))
    assert plan_step(scheduler).num_computed.tolist() == [0]
    answer(scheduler, 500)
    scheduler.transfers.ask_disk(True)
    for number in range(3):
        run(scheduler, f"{number}", range(200 + 50 * number, 250 + 50 * number))
    scheduler.add(make_request("again", PROMPT, max_tokens=1))
    assert scheduler.schedule() is None


def test_pictures_tell_blocks_of_equal_tokens_apart() -> None:
    chain = Chain([1], 2, np.arange(4, dtype=np.int32), np.array([[3, 4]], dtype=np.uint64))
    without = replace(chain, origins=None)
    assert len(chain.contents[0]) == len(without.contents[0]) + 16
    assert chain.keys[0, 1] != without.keys[0, 1]
