"""The running sequences as columns: one row per slot, as the worker holds them.

A step touches hundreds of sequences and changes two or three numbers of each; as columns this takes
a few vector operations. The table only stores: other modules decide the values.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.block_table import BlockTable, TableRow
from scheduler_svc.core.kv.block_table import Index as Index
from scheduler_svc.core.kv.prefix_cache import NO_ORIGIN
from scheduler_svc.core.request.identity import Digests, Origins
from scheduler_svc.core.request.kv_groups import KvGroup
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.request.sequence import Sequence, Status

Slots = NDArray[np.int32]  # [n] in the type of the wire
NO_TOKEN = -1  # filler of the stop table only: never equal to a sampled token


@dataclass(slots=True)
class Facts:
    """Columns that are constant while a sequence runs, gathered once per running set."""

    max_len: NDArray[np.int32]
    clients: NDArray[np.int32]
    handles: NDArray[np.uint32]


class RunningSet:
    """The running set: sequences in order of admission; replaced, never changed."""

    __slots__ = ("_facts", "index", "sequences", "slots")

    def __init__(self, sequences: tuple[Sequence, ...]) -> None:
        self.sequences = sequences
        self._facts: Facts | None = None
        # Stored here: a sequence that leaves forgets its slot, a past plan's running set must not.
        self.index: Index = np.array([s.slot for s in sequences], dtype=np.intp)
        self.slots: Slots = self.index.astype(np.int32)

    def facts(self, table: "SlotTable") -> Facts:
        """The constant columns of the set; call it only while the set is current."""
        if self._facts is None:
            self._facts = table.facts(self.index)
        return self._facts


class SlotTable:
    """Columns indexed by slot. Only rows of live sequences are meaningful."""

    def __init__(self, max_num_seqs: int, max_model_len: int, groups: tuple[KvGroup, ...]) -> None:
        # Whole blocks of every group fit; unused rows take address space, not memory.
        width = lcm(*(group.block_size for group in groups))
        width *= -(-max_model_len // width)
        self.token_ids: TokenIds = np.empty((max_num_seqs, width), dtype=np.int32)
        self.tables = tuple(
            BlockTable(number, group, max_model_len, self.token_ids)
            for number, group in enumerate(groups)
        )
        self.more = self.tables[1:]  # empty nearly always
        first = self.tables[0]
        self.block_size = first.block_size  # of group 0, as are the next columns
        self.block_table, self.num_blocks = first.block_table, first.num_blocks
        self.num_null, self.num_sealed = first.num_null, first.num_sealed
        self.capacity = first.capacity
        self.sequence: list[Sequence | None] = [None] * max_num_seqs

        def column() -> NDArray[np.int32]:
            return np.zeros(max_num_seqs, dtype=np.int32)

        self.is_live: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        # True from admission until the first token sampled after it.
        self.is_prefilling: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.num_tokens = column()  # known tokens: prompt and received output
        self.num_planned = column()  # known tokens and those in flight
        self.num_computed = column()  # tokens with KV, counting steps in flight
        self.max_len = column()
        self.min_len = column()
        self.client = column()
        self.handle: NDArray[np.uint32] = np.zeros(max_num_seqs, dtype=np.uint32)
        self.last_step: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        # Slots of sequences with an origin; that of their blocks after the last picture, which ends
        # at `extras_end`.
        self.origin_slots: set[int] = set()
        self.origin: Digests = np.zeros((max_num_seqs, 2), dtype=np.uint64)
        self.extras_end = column()
        # Slots of the few sequences that sample nothing or have prompt outputs due.
        self.prompt_output_slots: set[int] = set()
        # Slots with drafts in a step in flight: the columns say the most that it may bring.
        self.drafting_slots: set[int] = set()
        # Column i holds the i-th stop token of every slot; as many columns as needed.
        self.stop_ids: list[NDArray[np.int32]] = []

    def enter(self, sequence: Sequence, slot: int, num_computed: int, rows: list[TableRow]) -> None:
        """Fills a slot's row; `rows` are those of the block tables, by group."""
        num_tokens = len(sequence.token_ids)
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_tokens[slot] = self.num_planned[slot] = num_tokens
        self.num_computed[slot] = num_computed
        for table in self.tables:
            table.enter(sequence, slot, rows[table.number])
        self.max_len[slot] = sequence.max_len
        self.min_len[slot] = sequence.min_len
        self.client[slot] = sequence.request.client
        self.handle[slot] = sequence.request.handle
        self.enter_stops(slot, sequence.stop_ids)
        self.sequence[slot] = sequence
        self.is_live[slot] = self.is_prefilling[slot] = True
        if sequence.request.is_prompt_only or sequence.has_prompt_outputs_due:
            self.prompt_output_slots.add(slot)
        if sequence.origins is not None:
            self._enter_origin(sequence, slot, sequence.origins)
        sequence.slot = slot
        sequence.status = Status.RUNNING

    def _enter_origin(self, sequence: Sequence, slot: int, origins: Origins) -> None:
        extras = sequence.request.extras
        self.origin_slots.add(slot)
        self.origin[slot] = origins.last
        self.extras_end[slot] = extras[-1].end if extras else 0

    def _forget_origin(self, slot: int) -> None:
        if slot in self.origin_slots:
            self.origin_slots.remove(slot)
            self.origin[slot] = NO_ORIGIN
            self.extras_end[slot] = 0

    def settle(self, slot: int, token_ids: TokenIds) -> int:
        """Appends the tokens that a step with drafts brought; returns where the last of them is.

        The KV of drafts that did not come true is overwritten by the next step.
        """
        begin = int(self.num_tokens[slot])
        end = begin + len(token_ids)
        self.token_ids[slot, begin:end] = token_ids
        self.num_tokens[slot] = self.num_planned[slot] = end
        self.num_computed[slot] = end - 1
        self.drafting_slots.discard(slot)
        return end - 1

    def never_seal(self, slot: int) -> None:
        """Keeps a slot's blocks out of the prefix cache."""
        for table in self.tables:
            table.never_seal(slot)

    def enter_stops(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Sets the tokens that end a slot's sequence."""
        while len(self.stop_ids) < len(stop_ids):
            self.stop_ids.append(np.full(len(self.is_live), NO_TOKEN, dtype=np.int32))
        for position, column in enumerate(self.stop_ids):
            column[slot] = stop_ids[position] if position < len(stop_ids) else NO_TOKEN

    def leave(self, slot: int, status: Status) -> Sequence:
        """Removes and returns a slot's sequence with its tokens; the row still lists the blocks."""
        sequence = self.sequence[slot]
        assert sequence is not None
        sequence.token_ids = self.tokens(slot)
        sequence.slot = None
        sequence.status = status
        self.sequence[slot] = None
        self.is_live[slot] = False
        self.prompt_output_slots.discard(slot)
        self.drafting_slots.discard(slot)
        self._forget_origin(slot)
        return sequence

    def clear(self) -> None:
        """Empties every slot."""
        self.sequence = [None] * len(self.sequence)
        self.is_live[:] = self.is_prefilling[:] = False
        self.prompt_output_slots.clear()
        self.drafting_slots.clear()
        self.origin_slots.clear()
        self.origin[:] = NO_ORIGIN
        self.extras_end[:] = 0

    def are_among(self, slots: NDArray[np.integer], some: Iterable[int]) -> NDArray[np.bool_]:
        """True for each of these slots [rows] that is among some others."""
        is_one = np.zeros(len(self.is_live), dtype=np.bool_)
        is_one[list(some)] = True
        found: NDArray[np.bool_] = is_one[slots]
        return found

    def facts(self, index: Index) -> Facts:
        """The constant columns of the sequences in these slots."""
        return Facts(self.max_len[index], self.client[index], self.handle[index])

    def tokens(self, slot: int) -> TokenIds:
        """A copy of the known tokens of a slot's sequence."""
        return self.token_ids[slot, : self.num_tokens[slot]].copy()

    def blocks(self, slot: int) -> list[int]:
        """The block table of a slot's sequence, of group 0."""
        return self.tables[0].blocks(slot)

    def held_blocks(self, slot: int) -> list[int]:
        """The blocks of a slot's sequence, of all groups, without null blocks."""
        return [block_id for table in self.tables for block_id in table.held_blocks(slot)]

    def num_held(self, slot: int) -> int:
        """Number of the blocks that a slot's sequence holds, of all groups."""
        return sum(int(table.num_blocks[slot] - table.num_null[slot]) for table in self.tables)
