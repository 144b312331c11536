"""Invariants of a scheduler between any two calls."""

import itertools
from collections import Counter

import numpy as np

from scheduler_svc.core import Preemption, Scheduler, Sequence, Status
from scheduler_svc.core.kv.block_table import MAX_INT32, BlockTable
from scheduler_svc.core.kv.prefix_cache import PrefixCache
from scheduler_svc.core.kv.session_pool import SessionPool
from scheduler_svc.core.kv.tier import Tier
from scheduler_svc.core.kv.transfers import _InFlight
from scheduler_svc.core.queue.reservations import LEAD_S
from scheduler_svc.core.request.block_hash import chain_with

WITHOUT_SLOT = (Status.WAITING, Status.PREPARING, Status.WAITING_FOR_KV, Status.PREEMPTED)


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError when the scheduler's state is inconsistent."""
    _check_sequences(scheduler)
    _check_slots(scheduler)
    _check_blocks(scheduler)
    _check_progress(scheduler)
    _check_sharing(scheduler)
    _check_cache(scheduler)
    _check_snapshots(scheduler)
    _check_reservations(scheduler)
    _check_host(scheduler)
    _check_fork_groups(scheduler)
    _check_requirements(scheduler)
    _check_transfers(scheduler)


def _check_sequences(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    waiting, running = list(state.waiting), list(state.running.sequences)
    live = list(scheduler.live())
    assert len(waiting) == len(state.waiting)
    assert state.waiting.num_tokens == sum(len(s.token_ids) for s in waiting)
    assert state.waiting.num_preempted == sum(s.num_preemptions > 0 for s in waiting)
    for tenant in {s.request.tenant for s in live}:
        own = [s for s in waiting if s.request.tenant == tenant]
        load = state.waiting.load_of(tenant)
        assert (load.num_sequences, load.num_tokens) == (
            len(own),
            sum(len(s.token_ids) for s in own),
        )
    order = state.waiting.order
    assert tuple(running) == order.by_seniority(running), "the last would not give way first"
    for sequence in live:
        spent_s = sequence.timeline.spent_s(scheduler.now_s)
        assert abs(sum(spent_s.values()) - sequence.timeline.age_s(scheduler.now_s)) < 1e-9
        assert min(spent_s.values()) >= 0
    assert {id(s) for s in waiting + running} == {id(s) for s in live}
    assert len(waiting) + len(running) == len(live), "a sequence waits and runs, or twice"
    assert all(s.status in WITHOUT_SLOT and s.slot is None for s in waiting)
    assert all(s.status is Status.RUNNING for s in running)
    migration = scheduler.migration
    num_came = scheduler.num_accepted + migration.num_migrated_in
    assert num_came == scheduler.num_finished + migration.num_migrated_out + len(live)


def _check_slots(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    running = [s.slot for s in state.running.sequences if s.slot is not None]
    fenced = [entry.slot for entry in state._fenced if entry.slot is not None]
    everyone = sorted([*running, *fenced, *state.free_slots])
    assert everyone == list(range(scheduler.config.max_num_seqs)), "a slot is lost or doubled"
    assert state.running.slots.tolist() == running == state.running.index.tolist()
    in_flight = {slot for plan in scheduler._in_flight for slot in plan.slots.tolist()}
    assert not in_flight & set(state.free_slots), "a slot was freed under a step in flight"
    for sequence in state.running.sequences:
        assert sequence.slot is not None
        assert state.table.sequence[sequence.slot] is sequence
    if not scheduler.num_in_flight:
        assert not fenced and not state.departed


def _check_blocks(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    pool, table = state.pool, state.table
    hold: Counter[int] = Counter()
    for sequence in state.running.sequences:
        slot = sequence.slot
        assert slot is not None
        hold.update(table.held_blocks(slot))
        assert table.num_held(slot) == len(table.held_blocks(slot))
        for blocks in table.tables:
            num_null = int(blocks.num_null[slot])
            assert not any(blocks.blocks(slot)[:num_null])
            assert not num_null or blocks.group.window is not None
            computed = int(min(table.num_computed[slot], table.num_tokens[slot] - 1))
            assert num_null <= max(blocks.group.num_null(computed), 0), "a live block was freed"
    fenced = [block_id for entry in state._fenced for block_id in entry.block_ids]
    hold.update(fenced)
    if state.transfers is not None:
        hold.update(state.transfers.held)
    hold.update(state.pulls.held)
    hold.update(state.loans.held)
    assert state.num_fenced_blocks == len(fenced)
    for block_id in range(1, pool.num_blocks):
        assert pool.ref_count(block_id) == hold[block_id]
    assert hold[0] == 0, "the null block is in a table"
    assert pool.ref_count(0) == 0 and pool.hash_of(0) is None, "the null block is in use"
    in_use = len(hold) / pool.num_usable
    assert abs(pool.usage - in_use) < 1e-9
    free = list(pool.free_queue())
    assert len(free) == len(set(free)) == pool.num_free
    assert set(free) == set(range(1, pool.num_blocks)) - set(hold)
    if state.sessions is not None:
        assert state.sessions is pool
        _check_sessions(state.sessions, {s.number for s in state.waiting})


def _check_sessions(pool: SessionPool, waiting: set[int]) -> None:
    branches = pool._branches
    owned, free = Counter(pool._branch_of), Counter[int]()
    for name in (0, *branches):
        end = pool.num_blocks + name if name else 0
        for block_id in pool._list(end):
            assert pool._branch_of[block_id] == name, "a free block is in another branch's list"
            free[name] += 1
    entries = (*pool._ages.idle, *pool._ages.pinned, *pool._ages.stale)
    for name, branch in branches.items():
        assert (branch.num_blocks, branch.num_free) == (owned[name], free[name])
        expecting = sum(name in e.branches for e in pool._expecting.values())
        assert branch.num_expecting == expecting
        assert branch.num_blocks or branch.is_running or expecting, "an empty branch is left"
        is_listed = any(entry[1] == name for entry in entries)
        assert is_listed or not free[name] or expecting, "a branch is never handed out"
    assert set(owned) - {0} <= set(branches)
    assert pool.num_kept == sum(b.num_free for b in branches.values() if b.is_kept)
    assert set(pool._expecting) == waiting


def _check_progress(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    table = state.table
    awaited = Counter(slot for plan in scheduler._in_flight for slot in plan.sampled_slots.tolist())
    drafting = Counter[int]()
    for plan in scheduler._in_flight:
        drafting.update({slot: len(token_ids) for slot, token_ids in plan.drafts.items()})
    awaited.update(drafting)
    running = {s.slot for s in state.running.sequences}
    assert table.drafting_slots == drafting.keys() & running, "a range is awaited, or none is"
    for sequence in state.running.sequences:
        slot = sequence.slot
        known, planned = int(table.num_tokens[slot]), int(table.num_planned[slot])
        computed = int(table.num_computed[slot])
        assert planned - known == awaited[slot], "planned tokens and steps in flight disagree"
        assert sequence.num_prompt <= known < sequence.max_len
        assert planned <= sequence.max_len, "planned beyond the length limit"
        is_done = planned == sequence.max_len or sequence.request.is_prompt_only
        assert computed < planned or is_done or computed == planned - 1
        for blocks in table.tables:
            num_blocks, size = int(blocks.num_blocks[slot]), blocks.block_size
            assert int(blocks.capacity[slot]) == num_blocks * size >= computed
            assert num_blocks <= -(-(sequence.max_len - 1) // size), "more blocks than ever used"
        request = sequence.request
        asks = sequence.num_prompt_outputs_planned < request.prompt_output_end
        assert (slot in table.prompt_output_slots) == (asks or request.is_prompt_only)
        assert not asks or computed <= sequence.num_prompt_outputs_planned, (
            "a report was passed over"
        )
    for slot, sequence in state.departed.items():
        if sequence.status is not Status.FINISHED:
            assert sequence.num_awaited == awaited[slot]


def _check_sharing(scheduler: Scheduler) -> None:
    """A block in two tables is of one group, at one index, full, with equal content before it."""
    state = scheduler.internal_state
    owner: dict[int, tuple[Sequence, list[object]]] = {}
    for sequence in state.running.sequences:
        slot, request = sequence.slot, sequence.request
        assert slot is not None
        tokens = state.table.tokens(slot).tolist()
        for group, table in enumerate(state.table.tables):
            for index, block_id in enumerate(table.blocks(slot)):
                if not block_id:
                    continue
                end = (index + 1) * table.block_size
                pictures = [extra for extra in request.extras if extra.begin < end]
                root = request.cache_salt, request.adapter_id
                content = [group, root, pictures, tokens[:end]]
                if block_id in owner:
                    other, same = owner[block_id]
                    assert content == same, f"{request} and {other.request} share {block_id}"
                    assert len(tokens) >= end, "a block is shared before it is full"
                owner[block_id] = (sequence, content)


def _check_cache(scheduler: Scheduler) -> None:
    pool = scheduler.internal_state.pool
    flagged = [block_id for block_id, flag in enumerate(pool.cache.is_cached) if flag]
    cached = list[int]()
    for table, cache in zip(scheduler.internal_state.table.tables, pool.caches, strict=True):
        hashed = [b for b in range(1, pool.num_blocks) if cache.hash_of(b) is not None]
        entries = [*cache._block_of.values(), *itertools.chain(*cache._duplicates.values())]
        assert sorted(entries) == hashed and len(cache) == len(hashed), "a stale or lost entry"
        assert all(cache._duplicates.values()), "an empty list is kept"
        assert cache.is_cached is pool.cache.is_cached
        assert not hashed or scheduler.config.enable_prefix_caching
        cached += hashed
        if scheduler.config.enable_prefix_caching:
            _check_sealed(scheduler, table, cache)
    assert sorted(cached) == flagged, "a block is cached for two groups, or the map is wrong"


def _check_sealed(scheduler: Scheduler, blocks: BlockTable, cache: PrefixCache) -> None:
    table, size = scheduler.internal_state.table, blocks.block_size
    for sequence in scheduler.internal_state.running.sequences:
        slot = sequence.slot
        assert slot is not None
        sealed = int(blocks.num_sealed[slot])
        if sequence.is_private:
            assert sealed > blocks.block_table.shape[1], "an opted-out sequence will be found"
            continue
        covered = min(int(table.num_tokens[slot]), int(table.num_computed[slot]))
        # A block that a decode fills is sealed when that decode's token arrives.
        assert (covered - 1) // size <= sealed <= covered // size, "full is findable"
        assert int(blocks.num_null[slot]) <= sealed, "a block was given back before it was sealed"
        tokens, extras = table.tokens(slot)[: sealed * size], sequence.request.extras
        expected = chain_with(extras, 0, tokens, size, sequence.root or None)
        found = [cache.hash_of(b) for b in blocks.blocks(slot)[:sealed]]
        assert all(h in (e, None) for h, e in zip(found, expected, strict=True))


def _check_snapshots(scheduler: Scheduler) -> None:
    """A snapshot is held until it can be found, and one is due later than what is computed."""
    state, snapshots = scheduler.internal_state, scheduler.internal_state.snapshots
    if snapshots is None:
        return
    assert not snapshots._read, "a snapshot is held for a step that was planned"
    saves = [save for of_slot in snapshots._planned.values() for save in of_slot]
    held = [n for n in range(1, snapshots.num_snapshots + 1) if snapshots.pool.ref_count(n)]
    assert sorted(save.snapshot for save in saves) == held, "a snapshot is lost or doubled"
    assert snapshots.pool.num_free == snapshots.num_snapshots - len(held)
    assert not any(snapshots.pool.hash_of(save.snapshot) for save in saves), "found too early"
    assert all(state.table.is_live[save.slot] for save in saves)
    due = snapshots._due
    assert np.all(due[~state.table.is_live] == MAX_INT32)
    assert np.all(due[state.table.is_live] > state.table.num_computed[state.table.is_live])


def _check_reservations(scheduler: Scheduler) -> None:
    """The places kept in the queue are those of the reservations that are due."""
    reservations = scheduler.intake.reservations
    due = [p for p in reservations._by_id.values() if p.due_s - LEAD_S <= reservations._now_s]
    assert reservations.due.num_sequences == len(due), "kept places are not the due reservations"
    assert reservations.due.num_tokens == sum(p.num_tokens for p in due)
    for tenant in {p.tenant for p in due}:
        assert reservations.due_of(tenant).num_sequences == sum(p.tenant == tenant for p in due)


def _check_host(scheduler: Scheduler) -> None:
    """Every host block is either free or held by one waiting sequence."""
    state = scheduler.internal_state
    host = state.host
    hold = [block_id for s in host.sequences for block_id in host._held[s].host_blocks]
    assert sorted([*hold, *host._free, *host._freed]) == list(range(host.num_blocks))
    assert host.num_free == host.num_blocks - len(hold)
    for sequence in host.sequences:
        swapped = host.find(sequence)
        assert swapped is not None and sequence.has_run and sequence.slot is None
        for group, stored in zip(scheduler.config.groups, swapped.tables, strict=True):
            num_blocks = stored.num_null + len(stored.host_blocks)
            assert num_blocks == -(-swapped.num_computed // group.block_size)
    assert hold == [] or scheduler.config.preemption is Preemption.SWAP


def _check_fork_groups(scheduler: Scheduler) -> None:
    """A fork group consists of exactly the sequences that name it."""
    fork_groups = scheduler.internal_state.fork_groups
    named = [s for s in scheduler.live() if s.request.fork_group]
    assert sum(map(len, fork_groups._groups.values())) == sum(
        bool(fork_groups.of(s)) for s in named
    )
    for sequence in named:
        members = fork_groups.of(sequence)
        assert sequence in members or fork_groups.problem(sequence.request)
        prompts = {s.request.prompt_token_ids.tobytes() for s in members}
        assert len(prompts) <= 1, "siblings of different prompts"


def _check_requirements(scheduler: Scheduler) -> None:
    """A sequence that prepares is in no order; what is ready belongs to one that waits."""
    state, waits = scheduler.internal_state, scheduler.internal_state.requirements
    held, queued = list(waits), list(state.waiting.order)
    assert len(held) == len(waits) == len(set(map(id, held)))
    assert not {id(s) for s in held} & {id(s) for s in queued}, "it waits twice"
    asked: dict[int, Sequence] = {}
    for sequence in scheduler.live():
        is_held = sequence.status is Status.PREPARING
        assert is_held == (sequence in held)
        assert not is_held or waits.awaited(sequence.request), "it waits for nothing"
        numbers = sequence.preparations.values()
        asked.update(dict.fromkeys(numbers, sequence))
        assert not numbers or sequence.slot is None, "a preparation is used up by the entry"
        assert not numbers or (*sequence.preparations,) == waits.awaited(sequence.request)
        num_unanswered = sum(number in waits._unanswered for number in numbers)
        assert waits._asked.get(sequence, 0) == num_unanswered, "a wrong number of answers"
        assert (sequence in waits._queued) == (bool(numbers) and not num_unanswered)
    assert waits._unanswered | waits._ready == asked, "a preparation of another sequence"
    assert len(waits._asked) + waits.num_ready <= 2 * scheduler.config.max_num_seqs
    assert not asked.keys() & set(waits._dropped)
    assert not state.is_worker_away or not waits._ready


def _check_transfers(scheduler: Scheduler) -> None:
    """Transfers hold their blocks until they are answered; before, none of these is found."""
    state, transfers = scheduler.internal_state, scheduler.internal_state.transfers
    fetching = state.waiting.fetching
    for sequence in scheduler.live():
        assert (sequence.status is Status.WAITING_FOR_KV) == (sequence in fetching)
    awaited_ids = set(fetching.values()) - _check_moves(scheduler)
    if transfers is None:
        assert not awaited_ids
        return
    in_flight = transfers._in_flight
    awaited = {in_flight[transfer_id] for transfer_id in awaited_ids}
    assert all(one.is_fetch and not one.is_cancelled for one in awaited), "it waits for nothing"
    fetches = [one for one in in_flight.values() if one.is_fetch]
    assert all(one in awaited or one.is_cancelled for one in fetches), "no sequence awaits it"
    assert transfers.num_held == len(transfers.held)
    for tier in transfers.tiers:
        _check_tier(tier, [one for one in in_flight.values() if one.tier is tier])
    for one in in_flight.values():
        for block_id, block in zip(one.order.block_ids, one.order.tier_blocks, strict=True):
            found = state.pool.hash_of(block_id) if one.is_fetch else one.tier.pool.hash_of(block)
            assert found is None, "found before it is whole"
            assert not one.is_fetch or state.pool.ref_count(block_id) == 1, "filled and used"
        assert one.is_taken != (one.order.transfer_id in transfers._not_taken)
    going_on = {one.order.transfer_id for one in fetches if not one.is_cancelled}
    assert set(transfers._fetching.values()) <= going_on, "one would await what was cancelled"
    waiting = set(state.waiting)
    tried = transfers.num_tries.keys() | transfers.num_repeats.keys()
    assert tried <= waiting, "it has entered or left"


def _check_moves(scheduler: Scheduler) -> set[int]:
    """Checks pulls and loans; returns the ids of those that sequences wait for."""
    state, fetching = scheduler.internal_state, scheduler.internal_state.waiting.fetching
    pulls, loans = state.pulls, state.loans
    ids = set()
    for transfer_id, pulling in pulls._in_flight.items():
        awaits_it = fetching.get(pulling.sequence) == transfer_id
        assert awaits_it != pulling.is_cancelled, "it is pulled, and not awaited"
        assert pulling.is_taken != (transfer_id in pulls._not_taken)
        for block_id in pulling.order.block_ids:
            assert state.pool.ref_count(block_id) == 1, "filled and used"
            assert state.pool.hash_of(block_id) is None, "found before it is whole"
        ids.add(transfer_id)
    for sequence, arrived in pulls._arrived.items():
        assert sequence.slot is None and sequence in set(state.waiting), "it has entered or left"
        assert all(state.pool.ref_count(block_id) == 1 for block_id in arrived.given)
    for loan_id, leaving in loans._leaving.items():
        assert fetching.get(leaving.sequence) == loan_id, "it does not wait to leave"
        ids.add(loan_id)
    return ids


def _check_tier(tier: Tier, in_flight: list[_InFlight]) -> None:
    """A tier's blocks are free unless one of its transfers holds them."""
    held = Counter(block for one in in_flight for block in one.order.tier_blocks)
    for block in range(1, tier.pool.num_blocks):
        assert tier.pool.ref_count(block) == held[block], "a block of the tier is lost or doubled"
    stores = [one for one in in_flight if not one.is_fetch]
    assert tier.num_storing == sum(len(one.chain) for one in stores)
    assert tier.storing <= {h for one in stores for h in one.chain.hashes}
