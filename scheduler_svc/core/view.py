"""Questions about a core from outside it: read-only, and as cheap as the attributes they read.

The shell, the simulator and the benchmarks ask here, so what the core consists of may change under
them. Columns are indexed by slot and are views of the core's own memory that refuse writes: they
change with the next call of the core.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.block_shares import BlockShares, shares_of
from scheduler_svc.core.kv.sessions_view import SessionsView
from scheduler_svc.core.kv.slots import Index, SlotTable
from scheduler_svc.core.request.request import Request, TokenIds
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.step.state import SchedulerState

Kind = TypeVar("Kind", bound=np.generic)


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A KV block that is referenced or holds content that a prefix can hit."""

    block_id: int
    ref_count: int
    block_hash: int | None  # None: not in the prefix cache
    request_ids: list[str]  # of the running requests that hold it


class View:
    """The present state of a core, for reading."""

    __slots__ = ("_state",)

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def has_fork_group_of(self, request: Request) -> bool:
        """True if a request of the same fork group is live here."""
        return self._state.fork_groups.has_group_of(request)

    # --- counts ----------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """KV blocks that can be handed out."""
        return self._state.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence references."""
        return self._state.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content a prefix can hit."""
        return self._state.pool.num_cached

    @property
    def num_state_snapshots(self) -> int:
        """Snapshots of states that the worker has room for."""
        return self._state.num_state_snapshots

    @property
    def num_cached_snapshots(self) -> int:
        """Snapshots after which a prompt can begin."""
        return 0 if self._state.snapshots is None else len(self._state.snapshots)

    @property
    def block_usage(self) -> float:
        """Share of the blocks that are referenced, 0 to 1."""
        return self._state.pool.usage

    @property
    def block_size(self) -> int:
        """Tokens per block, of group 0."""
        return self._table.block_size

    @property
    def max_blocks_per_seq(self) -> int:
        """Entries of a slot's block table of group 0, as in all columns and tables here."""
        return self._state.table.block_table.shape[1]

    @property
    def num_host_blocks(self) -> int:
        """Host blocks for the KV of preempted sequences."""
        return self._state.host.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks that hold nothing."""
        return self._state.host.num_free

    @property
    def num_free_slots(self) -> int:
        """Slots that a sequence could enter now."""
        return len(self._state.free_slots)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and output tokens of the sequences without a slot."""
        return self._state.waiting.num_tokens

    @property
    def num_preparing(self) -> int:
        """Sequences that wait until the worker has prepared what they require."""
        return len(self._state.requirements)

    @property
    def num_suspects(self) -> int:
        """Sequences that compute alone, because a process died in their last step."""
        return len(self._state.suspects)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._state.num_preemptions

    @property
    def num_evictions(self) -> int:
        """Cached blocks handed out anew since the start."""
        return self._state.num_evictions

    @property
    def num_awaited_evicted(self) -> int:
        """Number of these that a waiting request would have found."""
        return self._state.num_awaited_evicted

    @property
    def sessions(self) -> SessionsView:
        """The sessions that the cache knows."""
        return SessionsView(self._state.sessions, self._state.config.block_size)

    @property
    def num_swapped_out(self) -> int:
        """Blocks copied to the host since the start."""
        return self._state.num_swapped_out

    @property
    def num_swapped_in(self) -> int:
        """Blocks copied back since the start."""
        return self._state.num_swapped_in

    @property
    def num_swapped_dropped(self) -> int:
        """Blocks copied to the host whose content was not needed there: neither back nor held."""
        held = self.num_host_blocks - self.num_free_host_blocks
        return self.num_swapped_out - self.num_swapped_in - held

    @property
    def num_preempted(self) -> int:
        """Waiting sequences that have lost a slot."""
        return self._state.waiting.num_preempted

    @property
    def is_worker_away(self) -> bool:
        """True if the worker was lost and no other has come."""
        return self._state.is_worker_away

    # --- sequences -------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold a slot, in order of admission."""
        return self._state.running.sequences

    @property
    def waiting(self) -> Iterator[Sequence]:
        """The sequences without a slot, the next to enter first."""
        return iter(self._state.waiting)

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens known of a live sequence: prompt and output received."""
        slot = sequence.slot
        return len(sequence.token_ids) if slot is None else int(self._table.num_tokens[slot])

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV is computed, or will be by the steps in flight; 0 without a slot."""
        return 0 if sequence.slot is None else int(self._table.num_computed[sequence.slot])

    def num_blocks_of(self, sequence: Sequence) -> int:
        """Entries of a sequence's block table; 0 without a slot."""
        return 0 if sequence.slot is None else int(self._table.num_blocks[sequence.slot])

    def block_ids(self, sequence: Sequence) -> list[int]:
        """A sequence's block table; empty without a slot."""
        return [] if sequence.slot is None else self._table.blocks(sequence.slot)

    # --- slots -----------------------------------------------------------------------------------

    def live_slots(self) -> Index:
        """The slots that hold a sequence, ascending."""
        return np.flatnonzero(self._table.is_live)

    def running_slots(self) -> Index:
        """The same, in order of admission."""
        return _read_only(self._state.running.index)

    def running_but(self, slots: Index) -> Index:
        """The running slots that are none of these, in order of admission."""
        running = self.running_slots()
        return running[~self._table.are_among(running, slots.tolist())]

    def settled_slots(self) -> Index:
        """The slots that hold a sequence and verify no drafts, ascending: it is known how far
        they will be once the steps in flight are done."""
        slots, drafting = self.live_slots(), self._table.drafting_slots
        return slots[~self._table.are_among(slots, drafting)] if drafting else slots

    def is_slot_free(self) -> NDArray[np.bool_]:
        """By slot: whether a sequence could enter it now. Others are live or fenced."""
        is_free = np.zeros(len(self._table.is_live), dtype=np.bool_)
        is_free[self._state.free_slots] = True
        return is_free

    def sequence_in(self, slot: int) -> Sequence | None:
        """The sequence that a slot holds."""
        return self._table.sequence[slot]

    @property
    def num_known(self) -> NDArray[np.int32]:
        """By slot: tokens of prompt and received output."""
        return _read_only(self._table.num_tokens)

    @property
    def is_prefilling(self) -> NDArray[np.bool_]:
        """By slot: whether no token was sampled since it was entered."""
        return _read_only(self._table.is_prefilling)

    @property
    def num_computed(self) -> NDArray[np.int32]:
        """By slot: tokens whose KV is computed, or will be by the steps in flight."""
        return _read_only(self._table.num_computed)

    @property
    def num_planned(self) -> NDArray[np.int32]:
        """By slot: tokens that are known, or awaited from the steps in flight."""
        return _read_only(self._table.num_planned)

    @property
    def num_blocks_by_slot(self) -> NDArray[np.int32]:
        """By slot: entries of its block table."""
        return _read_only(self._table.num_blocks)

    @property
    def block_table(self) -> NDArray[np.int32]:
        """By slot: its block ids; what lies past the slot's number of blocks means nothing."""
        return _read_only(self._table.block_table)

    @property
    def token_ids(self) -> TokenIds:
        """By slot: its tokens; what lies past the slot's number of tokens means nothing."""
        return _read_only(self._table.token_ids)

    # --- blocks ----------------------------------------------------------------------------------

    def block_shares(self, max_cells: int) -> BlockShares:
        """The blocks in cells, in the order of their ids, with what is held and cached of each."""
        pool = self._state.pool
        is_cached = np.frombuffer(pool.cache.is_cached, dtype=np.uint8)
        return shares_of(pool.ref_counts[1:], is_cached[1:], max_cells)

    def blocks(self) -> Iterator[BlockUse]:
        """The blocks in use in the order of their ids, then the cached ones, the oldest first."""
        pool, holders = self._state.pool, self._holders()
        in_use = (block_id for block_id in range(1, pool.num_blocks) if pool.ref_count(block_id))
        for block_id in in_use:
            held_by = holders.get(block_id, [])
            block_hash = pool.hash_of(block_id)
            yield BlockUse(block_id, pool.ref_count(block_id), block_hash, held_by)
        for block_id in pool.free_queue():
            if (block_hash := pool.hash_of(block_id)) is not None:
                yield BlockUse(block_id, 0, block_hash, [])

    def free_blocks(self) -> Iterable[int]:
        """The free blocks, in the order in which they will be handed out."""
        return self._state.pool.free_queue()

    def _holders(self) -> dict[int, list[str]]:
        holders: dict[int, list[str]] = {}
        for sequence in self._state.running.sequences:
            assert sequence.slot is not None
            for block_id in self._table.held_blocks(sequence.slot):
                holders.setdefault(block_id, []).append(sequence.request.request_id)
        return holders

    @property
    def _table(self) -> SlotTable:
        return self._state.table


def _read_only(column: "np.ndarray[Any, np.dtype[Kind]]") -> "np.ndarray[Any, np.dtype[Kind]]":
    view = column.view()
    view.flags.writeable = False
    return view
