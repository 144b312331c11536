"""Invariants of a scheduler between any two calls."""

import itertools
from collections import Counter

from scheduler_svc.core import Preemption, Scheduler, Sequence, Status
from scheduler_svc.core.queue.reservations import LEAD_S
from scheduler_svc.core.request.block_hash import chain_with

WITHOUT_SLOT = (Status.WAITING, Status.PREPARING, Status.PREEMPTED)


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError when the scheduler's state is inconsistent."""
    _check_sequences(scheduler)
    _check_slots(scheduler)
    _check_blocks(scheduler)
    _check_progress(scheduler)
    _check_sharing(scheduler)
    _check_cache(scheduler)
    _check_reservations(scheduler)
    _check_host(scheduler)
    _check_fork_groups(scheduler)
    _check_requirements(scheduler)


def _check_sequences(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    waiting, running = list(state.waiting), list(state.running.sequences)
    live = list(scheduler.live())
    assert len(waiting) == len(state.waiting)
    assert state.waiting.num_tokens == sum(len(s.token_ids) for s in waiting)
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
        assert sequence.slot is not None
        hold.update(table.held_blocks(sequence.slot))
        num_null = int(table.num_null[sequence.slot])
        assert not any(table.blocks(sequence.slot)[:num_null])
        assert not num_null or scheduler.config.sliding_window
    fenced = [block_id for entry in state._fenced for block_id in entry.block_ids]
    hold.update(fenced)
    assert state.num_fenced_blocks == len(fenced)
    for block_id in range(1, pool.num_blocks):
        assert pool.ref_count(block_id) == hold[block_id]
    assert hold[0] == 0, "the null block is in a table"
    assert pool.ref_count(0) == 0 and pool.cache.hash_of(0) is None, "the null block is in use"
    in_use = len(hold) / pool.num_usable
    assert abs(pool.usage - in_use) < 1e-9
    free = list(pool.free_queue())
    assert len(free) == len(set(free)) == pool.num_free
    assert set(free) == set(range(1, pool.num_blocks)) - set(hold)


def _check_progress(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    table, block_size = state.table, scheduler.config.block_size
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
        computed, num_blocks = int(table.num_computed[slot]), int(table.num_blocks[slot])
        assert planned - known == awaited[slot], "planned tokens and steps in flight disagree"
        assert sequence.num_prompt <= known < sequence.max_len
        assert planned <= sequence.max_len, "planned beyond the length limit"
        is_done = planned == sequence.max_len or sequence.request.is_prompt_only
        assert computed < planned or is_done or computed == planned - 1
        assert int(table.capacity[slot]) == num_blocks * block_size >= computed
        assert num_blocks <= -(-(sequence.max_len - 1) // block_size), "more blocks than ever used"
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
    """A block in two tables is at the same index of both, full, with the same content before it."""
    state = scheduler.internal_state
    owner: dict[int, tuple[Sequence, list[object]]] = {}
    for sequence in state.running.sequences:
        assert sequence.slot is not None
        size = scheduler.config.block_size
        request, tokens = sequence.request, state.table.tokens(sequence.slot).tolist()
        for index, block_id in enumerate(state.table.blocks(sequence.slot)):
            if not block_id:
                continue
            end = (index + 1) * size
            pictures = [extra for extra in request.extras if extra.begin < end]
            content = [request.cache_salt, request.adapter_id, *pictures, *tokens[:end]]
            if block_id in owner:
                other, same = owner[block_id]
                assert content == same, f"{request} and {other.request} share {block_id}"
                assert len(tokens) >= end, "a block is shared before it is full"
            owner[block_id] = (sequence, content)


def _check_cache(scheduler: Scheduler) -> None:
    state = scheduler.internal_state
    pool, table, size = state.pool, state.table, scheduler.config.block_size
    hashed = [b for b in range(1, pool.num_blocks) if pool.cache.hash_of(b) is not None]
    flagged = [block_id for block_id, flag in enumerate(pool.cache.is_cached) if flag]
    assert flagged == hashed, "the map of cached blocks is of another cache"
    entries = [*pool.cache._block_of.values(), *itertools.chain(*pool.cache._duplicates.values())]
    assert sorted(entries) == hashed and len(pool.cache) == len(hashed), "a stale or lost entry"
    assert all(pool.cache._duplicates.values()), "an empty list is kept"
    for sequence in state.running.sequences:
        slot = sequence.slot
        assert slot is not None
        sealed = int(table.num_sealed[slot])
        if not scheduler.config.enable_prefix_caching:
            assert not hashed
            continue
        if sequence.is_private:
            assert sealed > table.block_table.shape[1], "an opted-out sequence will be found"
            continue
        covered = min(int(table.num_tokens[slot]), int(table.num_computed[slot]))
        # A block that a decode fills is sealed when that decode's token arrives.
        assert (covered - 1) // size <= sealed <= covered // size, "full is findable"
        assert int(table.num_null[slot]) <= sealed, "a block was given back before it was sealed"
        tokens, extras = table.tokens(slot)[: sealed * size], sequence.request.extras
        expected = chain_with(extras, 0, tokens, size, sequence.root or None)
        found = [pool.cache.hash_of(b) for b in table.blocks(slot)[:sealed]]
        assert all(h in (e, None) for h, e in zip(found, expected, strict=True))


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
    host, block_size = state.host, scheduler.config.block_size
    hold = [block_id for s in host.sequences for block_id in host._held[s].host_blocks]
    assert sorted([*hold, *host._free, *host._freed]) == list(range(host.num_blocks))
    assert host.num_free == host.num_blocks - len(hold)
    for sequence in host.sequences:
        swapped = host.find(sequence)
        assert swapped is not None and sequence.has_run and sequence.slot is None
        num_blocks = swapped.num_null + len(swapped.host_blocks)
        assert num_blocks == -(-swapped.num_computed // block_size)
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
