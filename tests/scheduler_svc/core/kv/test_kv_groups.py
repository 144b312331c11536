"""Several KV groups over one pool of pages: their tables, hits, windows and needs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core import KvGroup, Preemption, Refused, Scheduler
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.kv.block_pool import BlockPool
from tests.scheduler_svc.core.builders import (
    SMALL,
    answer,
    make_request,
    make_scheduler,
    plan_step,
    step,
)
from tests.scheduler_svc.core.draws import SeededDraw
from tests.scheduler_svc.core.soak import draw_weights
from tests.scheduler_svc.core.world import RULES, World, draw_config

FULL, WIDE, NARROW = KvGroup(4), KvGroup(8), KvGroup(4, window=6)


def scheduler_of(*groups: KvGroup, **limits: Any) -> Scheduler:
    return make_scheduler(block_size=groups[0].block_size, kv_groups=groups, **limits)


def run(scheduler: Scheduler, request_id: str, prompt: Any, max_tokens: int = 1) -> int:
    """Runs a request to its end; returns how many tokens it found in the cache."""
    scheduler.add(make_request(request_id, prompt, max_tokens=max_tokens))
    cached = plan_step(scheduler).new_sequences[0].num_computed_tokens
    while scheduler.num_in_flight or scheduler.num_running:
        while scheduler.num_in_flight:
            plan = scheduler.oldest_in_flight
            assert plan is not None
            answer(scheduler, *[500] * len(plan.sampled_slots))
        if scheduler.num_running:
            plan_step(scheduler)
        check_invariants(scheduler)
    return cached


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ((KvGroup(8), KvGroup(4)), "block_size of group 0 is 8, not 4"),
        ((KvGroup(4), (0, None)), "block_size is 0"),
        ((KvGroup(4), (4, 1)), "window is 1"),
        ((KvGroup(4), (4, 0)), "window is 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(groups: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made = tuple(one if isinstance(one, KvGroup) else KvGroup(*one) for one in groups)
        replace(SMALL, kv_groups=made)


def test_what_never_fits_is_counted_over_all_groups() -> None:
    """9 tokens, of which the last is not computed: 2 pages, 1 page, and 2 of a window."""
    scheduler_of(FULL, WIDE, NARROW, blocks=5).add(make_request("a", 8, max_tokens=1))
    with pytest.raises(Refused, match="to 5 KV blocks of 4 and 8 and 4 tokens, the worker has 4"):
        scheduler_of(FULL, WIDE, NARROW, blocks=4).add(make_request("a", 8, max_tokens=1))


# --- tables --------------------------------------------------------------------------------------


def test_each_group_has_a_table_of_pages_of_its_own() -> None:
    scheduler = scheduler_of(FULL, WIDE, blocks=16)
    scheduler.add(make_request("a", 9, max_tokens=9))
    plan = plan_step(scheduler)
    (new,) = plan.new_sequences
    assert new.block_ids == [1, 2, 3] and new.group_block_ids == ([4, 5],)
    assert not plan.appended_to_groups
    gained = {0: list[int](), 1: list[int]()}
    for _ in range(8):
        answer(scheduler, 500)
        plan = plan_step(scheduler)
        gained[0] += plan.appended_block_ids
        for appended in plan.appended_to_groups:
            assert appended.slots == [new.slot]
            gained[appended.group] += appended.block_ids
        check_invariants(scheduler)
    assert gained == {0: [6, 7], 1: [8]} and scheduler.view.num_free_blocks == 8


def test_pages_that_slid_out_of_one_group_serve_another() -> None:
    scheduler = scheduler_of(FULL, NARROW, blocks=10, max_num_batched_tokens=4)
    scheduler.add(make_request("a", 20, max_tokens=2))
    (sequence,) = scheduler.live()
    for _ in range(5):
        plan = plan_step(scheduler)
        answer(scheduler, *[500] * len(plan.sampled_slots))
        check_invariants(scheduler)
    plan_step(scheduler)
    full, narrow = scheduler.internal_state.table.tables
    assert sequence.slot is not None
    assert narrow.blocks(sequence.slot)[:3] == [0, 0, 0], "16 tokens of 20 are before the window"
    given_back = {2, 4, 6}  # the pages that it took with its first three chunks
    assert given_back & set(full.blocks(sequence.slot)), "they serve the group without a window"


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_64_sequences_of_8k_hold_what_gemma_3s_windows_and_full_layers_need(
    enable_prefix_caching: bool,
) -> None:
    """Gemma 3 4B: pages of 80 tokens of 5 full layers, or of 16 tokens of 29 with a window."""
    length, last, budget, window = 8192, 96, 8192, 1024
    full, windowed = -(-length // 80), -(-(window - 1) // 16) + 1
    chunk = budget // 16  # pages of the step's own tokens, before the window moves past them
    scheduler = scheduler_of(
        KvGroup(80),
        KvGroup(16, window=window),
        blocks=64 * (full + windowed) + chunk,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_model_len=length,
        vocab_size=length,
        enable_prefix_caching=enable_prefix_caching,
    )
    for number in range(64):
        prompt = [1 + number, *range(2, length - last + 1)]
        scheduler.add(make_request(str(number), prompt, max_tokens=last))
    held = []
    while scheduler.num_running or scheduler.num_waiting:
        step(scheduler)
        held.append(scheduler.view.num_blocks - scheduler.view.num_free_blocks)
    check_invariants(scheduler)
    assert scheduler.view.num_preemptions == 0
    assert 64 * (full + windowed - 2) <= max(held) <= 64 * (full + windowed) + chunk
    in_one_table = 64 * -(-length // 16) * (5 + 29) / 29  # pages of as many bytes
    assert max(held) < 0.31 * in_one_table


def test_all_groups_get_their_pages_or_a_sequence_waits() -> None:
    scheduler = scheduler_of(FULL, FULL, blocks=5)
    scheduler.add(make_request("a", 8, max_tokens=1))
    scheduler.add(make_request("b", range(20, 27), max_tokens=1))
    plan = plan_step(scheduler)
    assert [new.request.request_id for new in plan.new_sequences] == ["a"]
    assert plan.hold is not None and plan.hold.blocks_short == {"b": 3}


# --- hits ----------------------------------------------------------------------------------------


def test_a_hit_ends_where_blocks_of_all_groups_end() -> None:
    scheduler = scheduler_of(FULL, WIDE, blocks=32)
    assert run(scheduler, "a", 23) == 0
    assert run(scheduler, "b", 23) == 16, "20 tokens of one group, 16 of the other"


def test_a_hit_is_the_longest_that_all_groups_have() -> None:
    scheduler = scheduler_of(FULL, KvGroup(4), blocks=32)
    run(scheduler, "a", 21)
    first, second = scheduler.internal_state.pool.caches
    prompt = np.arange(1, 22, dtype=np.int32)
    probe = scheduler.add(make_request("b", prompt.tolist(), max_tokens=1))
    hashes = probe.block_hashes(4)
    found = [cache.lookup(hashes, prompt) for cache in (first, second)]
    assert [len(blocks) for blocks in found] == [5, 5] and not set(found[0]) & set(found[1])
    second.evict(found[1][3])
    (new,) = plan_step(scheduler).new_sequences
    assert new.num_computed_tokens == 12
    assert new.block_ids[:3] == found[0][:3] and new.group_block_ids[0][:3] == found[1][:3]
    check_invariants(scheduler)


def test_a_group_with_a_window_needs_only_the_end_of_a_prefix() -> None:
    scheduler = scheduler_of(FULL, NARROW, blocks=32)
    run(scheduler, "a", 25)
    _, narrow = scheduler.internal_state.pool.caches
    prompt = np.arange(1, 26, dtype=np.int32)
    probe = scheduler.add(make_request("b", prompt.tolist(), max_tokens=1))
    blocks, _ = narrow.lookup_runs(probe.block_hashes(4), prompt, probe.root)
    for block_id in blocks[:4]:
        narrow.evict(block_id)
    (new,) = plan_step(scheduler).new_sequences
    # At 24 the window reaches back to 19, in block 4; all before it are null.
    assert new.num_computed_tokens == 24
    assert new.group_block_ids[0][:6] == [0, 0, 0, 0, *blocks[4:6]]
    check_invariants(scheduler)


def test_where_the_end_is_gone_from_a_window_an_earlier_end_is_hit() -> None:
    scheduler = scheduler_of(FULL, NARROW, blocks=32)
    run(scheduler, "a", 25)
    _, narrow = scheduler.internal_state.pool.caches
    prompt = np.arange(1, 26, dtype=np.int32)
    probe = scheduler.add(make_request("b", prompt.tolist(), max_tokens=1))
    blocks, _ = narrow.lookup_runs(probe.block_hashes(4), prompt, probe.root)
    narrow.evict(blocks[4])
    (new,) = plan_step(scheduler).new_sequences
    assert new.num_computed_tokens == 16
    check_invariants(scheduler)


def test_a_page_is_found_by_its_group_alone() -> None:
    pool = BlockPool(6, 4, 4)
    content = np.array([[1, 2, 3, 4]], dtype=np.int32)
    pool.caches[1].insert(np.array(pool.take(1)), [77], np.zeros(1, dtype=np.uint64), content)
    assert pool.caches[0].lookup([77], content[0]) == []
    assert pool.caches[1].lookup([77], content[0]) == [1]
    assert pool.hash_of(1) == 77 and pool.num_cached == 1 and pool.cache.is_cached[1]
    pool.release([1])
    pool.take(5)
    assert pool.hash_of(1) is None and pool.num_evictions == 1 and not any(pool.cache.is_cached)


def test_with_states_in_slots_nothing_is_hit_in_any_group() -> None:
    scheduler = scheduler_of(FULL, WIDE, NARROW, blocks=32, has_states=True)
    assert [run(scheduler, name, 23) for name in "ab"] == [0, 0]


# --- moves ---------------------------------------------------------------------------------------


def test_a_fork_shares_full_pages_and_copies_the_last_one_of_each_group() -> None:
    scheduler = scheduler_of(FULL, WIDE, NARROW, blocks=32)
    for name in "ab":
        scheduler.add(make_request(name, 11, max_tokens=2, fork_group="g"))
    first = plan_step(scheduler).new_sequences[0]
    answer(scheduler, 500)
    plan = plan_step(scheduler)
    (fork,) = plan.new_sequences
    assert fork.num_computed_tokens == 10
    assert fork.block_ids[:2] == first.block_ids[:2]
    assert fork.group_block_ids[0][:1] == first.group_block_ids[0][:1]
    # The window at 10 reaches back to 5: the first page of its group is not read.
    assert fork.group_block_ids[1][:2] == [0, first.group_block_ids[1][1]]
    assert plan.moves is not None
    lasts = [first.block_ids[2], first.group_block_ids[0][1], first.group_block_ids[1][2]]
    assert plan.moves.copied_from == lasts
    check_invariants(scheduler)


def test_pages_of_all_groups_are_swapped_out_and_in() -> None:
    scheduler = scheduler_of(
        *(FULL, WIDE, NARROW),
        blocks=16,
        max_num_batched_tokens=8,
        preemption=Preemption.SWAP,
        num_host_blocks=16,
    )
    for name, first in (("a", 1), ("b", 100)):
        scheduler.add(make_request(name, range(first, first + 9), max_tokens=20))
    swapped_in = list[int]()
    while scheduler.num_running or scheduler.num_waiting:
        plan = plan_step(scheduler)
        answer(scheduler, *[500] * len(plan.sampled_slots))
        check_invariants(scheduler)
        swapped_in += [] if plan.moves is None else plan.moves.swapped_in
    view = scheduler.view
    assert view.num_preemptions == 1 and view.num_swapped_out > 3
    assert len(set(swapped_in)) == len(swapped_in) > 3
    assert view.num_free_host_blocks == 16


# --- one group is what it was --------------------------------------------------------------------


def plans_of(kv_groups: tuple[KvGroup, ...], seed: str) -> str:
    """The digest of the plans of a random walk with these groups."""
    draw = SeededDraw(seed)
    config = replace(draw_config(draw), block_size=4, kv_groups=kv_groups)
    world, weights = World(config, draw.integer(0, 3)), draw_weights(draw)
    for _ in range(250):
        possible = [rule for rule in RULES.values() if rule.is_possible(world)]
        draw.weighted(possible, [weights[rule.name] for rule in possible]).apply(world, draw)
    world.settle()
    return world.plans.hexdigest()


@pytest.mark.parametrize("seed", range(3))
def test_one_group_that_is_told_is_the_one_that_is_not(seed: int) -> None:
    assert plans_of((), f"one/{seed}") == plans_of((KvGroup(4),), f"one/{seed}")


def test_a_grant_takes_pages_of_all_groups() -> None:
    scheduler = scheduler_of(FULL, WIDE, NARROW, blocks=32)
    scheduler.add(make_request("a", 7, max_tokens=30))
    step(scheduler)
    plans = scheduler.grant(12)
    assert len(plans) == 12
    first = plans[0]
    assert len(first.appended_block_ids) == 3
    assert [(one.group, len(one.block_ids)) for one in first.appended_to_groups] == [(1, 2), (2, 3)]
    assert not any(plan.appended_to_groups for plan in plans[1:])
    check_invariants(scheduler)
