"""Decides what is fetched from tiers before a sequence enters, and what is stored there.

A prompt's blocks are stored once the step that computed them is answered: then the device is done
with them, and their content changes no more. An answer's are stored when it ends. A sequence that
could enter, and whose prompt a tier holds further than the device does, waits for the rest instead
of computing it: first for what the faster tier holds, then for what the slower one holds after it.
"""

from scheduler_svc.core.kv.chain import BlockIds, Chain
from scheduler_svc.core.kv.sealing import keys_of
from scheduler_svc.core.kv.tier import Tier
from scheduler_svc.core.kv.transfers import MAX_TRIES, KvTransfers
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.plan import StepPlan
from scheduler_svc.core.step.start import Start
from scheduler_svc.core.step.state import SchedulerState


def begin_fetch(state: SchedulerState, sequence: Sequence, start: Start) -> int | None:
    """Orders what a tier holds of a sequence after `start`; the transfer that it now awaits.

    None when it should enter and compute: no tier holds more, there is no room for it, or the
    sequence has waited before. Where another transfer brings its next block it awaits that one.
    """
    transfers = state.transfers
    if transfers is None or not _may_wait(state, sequence, start, transfers):
        return None
    size = state.config.block_size
    chain = Chain.of(sequence, len(start.shared), sequence.num_skippable // size, size)
    if not len(chain):
        return None
    tried = transfers.num_tries.get(sequence, 0)
    if (transfer_id := transfers.fetch_of(chain.hashes[0])) is not None:
        transfers.num_tries[sequence] = tried + 1
        return transfer_id
    room = state.pool.num_free - state.pool.num_free_among(start.shared)
    for number in range(tried // MAX_TRIES, len(transfers.tiers)):
        tier = transfers.tiers[number]
        found = tier.find(chain)[: max(room, 0)] if tier.is_asked else []
        if found:
            transfers.num_tries[sequence] = MAX_TRIES * (number + 1)
            return _fetch(state, sequence, start, chain.part(0, len(found)), found, tier)
    return None


def _fetch(
    state: SchedulerState,
    sequence: Sequence,
    start: Start,
    chain: Chain,
    found: BlockIds,
    tier: Tier,
) -> int:
    assert state.transfers is not None
    begin, end, size = len(start.shared), len(start.shared) + len(found), state.config.block_size
    is_followed = state.pool.cache.changes is not None
    keys = keys_of(sequence.request, range(begin, end), size) if is_followed else ()
    return state.transfers.fetch(tier, chain, found, start.shared, keys)


def _may_wait(
    state: SchedulerState, sequence: Sequence, start: Start, transfers: KvTransfers
) -> bool:
    """True if a sequence may wait for KV that begins where its start ends."""
    if sequence.is_private or sequence.is_suspect:
        return False
    if start.sibling is not None or start.host_blocks or start.given:
        return False  # it has its KV from elsewhere
    # A copy that the next step makes may read a block that is free by now.
    tried = transfers.num_tries.get(sequence, 0)
    return tried < MAX_TRIES * len(transfers.tiers) and not state.has_moves


def store_prompts(state: SchedulerState, plan: StepPlan) -> None:
    """Orders the prompt blocks that an answered step has filled to be kept in the tiers.

    The slots of the plan are its sequences' still, or were until this answer: their rows list the
    blocks. A block whose content is not what the prompt says any more ends what is stored.
    """
    transfers, size = state.transfers, state.config.block_size
    if transfers is None:
        return
    table, slots = state.table.tables[0].block_table, plan.slots.tolist()
    entered = {new.slot for new in plan.new_sequences}
    spans = zip(plan.num_computed.tolist(), plan.num_computed_after.tolist(), strict=True)
    for slot, sequence, (before, after) in zip(slots, plan.sequences(), spans, strict=True):
        # What a prompt found in the cache when it entered is used again, so it stays in the tiers.
        begin = 0 if slot in entered else before // size
        until = min(after, sequence.num_prompt) // size
        if until <= begin or sequence.is_private:
            continue
        chain = Chain.of(sequence, begin, until, size)
        block_ids = _unchanged(state, chain, table[slot, begin:until].tolist())
        for tier in transfers.tiers if block_ids else ():
            transfers.store(tier, chain.part(0, len(block_ids)), block_ids)


def store_answer(state: SchedulerState, sequence: Sequence, block_ids: BlockIds) -> None:
    """Orders the blocks that a sequence computed after its prompt to be kept in the tiers.

    It has ended, and these were its blocks: a session's next turn repeats the answer.
    """
    transfers, size = state.transfers, state.config.block_size
    if transfers is None or sequence.is_private:
        return
    begin = sequence.num_prompt // size
    until = min(len(sequence.token_ids) // size, len(block_ids))
    if until <= begin:
        return
    chain = Chain.of(sequence, begin, until, size)
    held = _unchanged(state, chain, block_ids[begin:until])
    for tier in transfers.tiers if held else ():
        transfers.store(tier, chain.part(0, len(held)), held)


def _unchanged(state: SchedulerState, chain: Chain, block_ids: BlockIds) -> BlockIds:
    """The blocks before the first whose content is not what the chain says."""
    cache = state.pool.cache
    pairs = enumerate(zip(block_ids, chain.hashes, strict=True))
    end = next((i for i, (block, h) in pairs if cache.hash_of(block) != h), len(block_ids))
    return block_ids[:end]
