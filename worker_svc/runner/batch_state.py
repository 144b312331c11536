"""The worker's memory between steps: one row per slot, changed by deltas.

Token rows and block tables, those of all KV groups in one row, live on the device; a sampled token
is written to its row there, and the next step reads its input from the row. Counts and sampling
parameters are one host array. A step is a transaction: `stage` checks it on a copy and touches
nothing, `write` brings the device rows up to date, then either `commit` or `rollback`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire.state_hash import StateHashes, block_weights, slot_hashes, table_sums
from worker_svc.adapters.store import AdapterStore
from worker_svc.adapters.weights import LoadedAdapter
from worker_svc.attention.pictures import SequencePictures
from worker_svc.device.transfer import upload
from worker_svc.protocol.kv_groups import TableLayout
from worker_svc.protocol.step import (
    BadStep,
    IntColumn,
    Limits,
    NewSequence,
    RowSampling,
    StepInput,
)
from worker_svc.runner.block_tables import append, check_computed, tables_of
from worker_svc.runner.entering_pictures import entering_pictures
from worker_svc.runner.picture_outputs import PictureOutputs
from worker_svc.runner.rows import Rows, drafts_of, refuse, runs
from worker_svc.runner.state_saves import NONE_DUE, DueSaves, Pending, add_saves, take_due
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.logits_processors import LogitsProcessors
from worker_svc.sampling.logprobs import Wanted
from worker_svc.sampling.prompt_outputs import Part
from worker_svc.sampling.row_processors import ProcessedRows, RowProcessors, SampledLast, collect
from worker_svc.sampling.sampler import SamplingRows

# One element per slot. num_tokens counts known tokens, sampled ones included; 0 is an empty slot.
SLOT = np.dtype(
    [
        ("num_tokens", "i8"),
        ("num_prompt", "i8"),
        ("num_computed", "i8"),
        ("num_blocks", "i8"),  # of KV group 0
        ("min_tokens", "i8"),
        ("top_k", "i8"),
        ("seed", "u8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("has_processors", "?"),
        ("has_logprobs", "?"),
        ("has_grammar", "?"),
        ("prompt_only", "?"),
        ("is_refused", "?"),
        ("has_adapter", "?"),
        ("adapter_place", "i4"),  # on the device, from 1 on; 0: it has no place
        ("has_pictures", "?"),
        ("prompt_output_begin", "i8"),
        ("prompt_output_end", "i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class Occupant:
    """The parts of a slot's sequence that are no numbers."""

    request_id: str
    sampling: RowSampling
    entered_s: float  # monotonic
    processors: RowProcessors
    adapter: LoadedAdapter | None = None
    pictures: SequencePictures | None = None


@dataclass(slots=True)
class HostSlots:
    """The host's view of all slots. Once committed it is replaced, never changed."""

    columns: NDArray[np.void]  # [max_num_seqs] of SLOT
    occupants: list[Occupant | None]
    other_blocks: NDArray[np.int64]  # [groups after group 0, max_num_seqs], as num_blocks
    state_saves: Pending = field(default_factory=dict)

    @classmethod
    def empty(cls, max_num_seqs: int, num_groups: int = 1) -> "HostSlots":
        """Slots without sequences."""
        other_blocks = np.zeros((num_groups - 1, max_num_seqs), dtype=np.int64)
        return cls(np.zeros(max_num_seqs, dtype=SLOT), [None] * max_num_seqs, other_blocks)

    def copy(self) -> "HostSlots":
        """A copy of the slots, to be changed."""
        others = self.other_blocks  # empty with one group, and then never changed
        if len(others):
            others = others.copy()
        return HostSlots(
            self.columns.copy(), self.occupants.copy(), others, self.state_saves.copy()
        )

    @property
    def live_slots(self) -> IntColumn:
        return np.flatnonzero(self.columns["num_tokens"])


@dataclass(frozen=True, slots=True)
class Staged:
    """A checked step on its own copy of the table; nothing outside it has changed."""

    step: StepInput
    table: HostSlots
    appended_at: IntColumn  # position in the block table of each appended block
    rows: Rows
    state_saves: DueSaves = NONE_DUE
    # The same of the step's appended_to_groups, as columns of the row of tables.
    appended_to_groups_at: tuple[IntColumn, ...] = ()

    def counts_after(self) -> tuple[IntColumn, IntColumn, IntColumn]:
        """The live slots, and what each has computed and knows once the step is done."""
        slots, rows = self.table.live_slots, self.rows
        num_computed = self.table.columns["num_computed"].copy()
        num_tokens = self.table.columns["num_tokens"].copy()
        num_computed[rows.slots] += rows.num_advanced
        num_tokens[rows.slots] += rows.num_sampled
        return slots, num_computed[slots], num_tokens[slots]


@dataclass(slots=True)
class _Saved:
    """A slot's device rows before a new sequence overwrote them."""

    slot: int
    token_row: Tensor
    block_tables: Tensor


@dataclass(slots=True)
class BatchState:
    """The slots of one worker. Only the compute thread changes it."""

    limits: Limits
    device: torch.device
    grammars: Grammars
    adapters: AdapterStore | None = None  # None: sequences have none
    pictures: PictureOutputs | None = None  # None: it serves no pictures
    table: HostSlots = field(init=False)
    # [max_num_seqs, max_model_len + 1]: a step planned before a stop was known may still sample
    # one token past the last position.
    token_rows: Tensor = field(init=False)
    tables: TableLayout = field(init=False)  # the columns of block_tables, by group
    block_tables: Tensor = field(init=False)  # [max_num_seqs, blocks of all tables], 0 as filler
    sampled_last: SampledLast | None = field(init=False, default=None)  # if they reach the host
    _last_slots: IntColumn | None = field(init=False, default=None)
    _saved: list[_Saved] = field(init=False, default_factory=list)
    _block_weights: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.table = self._no_slots()
        shape = (limits.max_num_seqs, limits.max_model_len + 1)
        self.token_rows = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.tables = limits.tables
        shape = (limits.max_num_seqs, self.tables.width)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._block_weights = block_weights(limits.max_blocks_per_seq)

    def stage(self, step: StepInput) -> Staged:
        """Applies the step's deltas to a copy; raises BadStep and leaves no trace if it cannot."""
        table = self._no_slots() if step.reset else self.table.copy()
        self._free(table, step.freed_slots)
        for index, sequence in enumerate(step.new_sequences):
            self._enter(table, sequence, f"new_sequences[{index}]")
        appended_at, others_at = self._append(table, step)
        rows = self._rows(table, step)
        add_saves(table.state_saves, step.state_saves, table.columns["num_computed"])
        due = take_due(table.state_saves, rows)
        return Staged(step, table, appended_at, rows, due, others_at)

    def _no_slots(self) -> HostSlots:
        return HostSlots.empty(self.limits.max_num_seqs, len(self.limits.groups))

    def write(self, staged: Staged, enter: Callable[[Staged], None] | None = None) -> None:
        """Brings the device rows up to date with a staged step.

        `enter` writes the rows of its new sequences in another way than here.
        """
        step, rows, new = staged.step, staged.rows, staged.step.new_sequences
        for slot in (sequence.slot for sequence in new):
            if self.table.columns["num_tokens"][slot]:
                self._saved.append(
                    _Saved(slot, self.token_rows[slot].clone(), self.block_tables[slot].clone())
                )
        if new:
            (enter or self._enter_rows)(staged)
        if len(staged.appended_at):
            index = step.appended_slots * self.block_tables.shape[1] + staged.appended_at
            self._put(self.block_tables, index, step.appended_block_ids)
        for one, at in zip(step.appended_to_groups, staged.appended_to_groups_at, strict=False):
            self._put(self.block_tables, one.slots * self.block_tables.shape[1] + at, one.block_ids)
        if (drafts := rows.drafts) is not None and not drafts.are_made_here:
            self.write_known(rows, drafts.token_ids, drafts.num_drafted)

    def _enter_rows(self, staged: Staged) -> None:
        new = staged.step.new_sequences
        for slot in (sequence.slot for sequence in new):
            self.block_tables[slot].zero_()
        firsts = [sequence.slot * self.token_rows.shape[1] for sequence in new]
        self._scatter(self.token_rows, firsts, [sequence.token_ids for sequence in new])
        width = self.block_tables.shape[1]
        firsts = [one.slot * width + part.begin for one in new for part in self.tables.parts]
        tables = [block_ids for one in new for block_ids in tables_of(one)]
        self._scatter(self.block_tables, firsts, tables)

    def write_sampled(self, rows: Rows, token_ids: Tensor) -> None:
        """Writes sampled tokens [R] after the known ones; they count from the commit on."""
        ends = (rows.slots * self.token_rows.shape[1] + rows.known_ends)[rows.samples]
        (index,) = upload(self.device, ends)
        self.token_rows.view(-1).index_copy_(0, index, token_ids.int())

    def write_known(self, rows: Rows, token_ids: NDArray[np.integer], counts: IntColumn) -> None:
        """The same of tokens that the host knows, `counts` [B] of each row."""
        firsts = rows.slots * self.token_rows.shape[1] + rows.known_ends
        self._put(self.token_rows, runs(firsts, counts), token_ids)

    def commit(self, staged: Staged) -> None:
        """The step worked: its rows advance and its table is the state."""
        rows, columns = staged.rows, staged.table.columns
        columns["num_computed"][rows.slots] += rows.num_advanced
        columns["num_tokens"][rows.slots] += rows.num_sampled
        self.table = staged.table
        if self.pictures is not None:
            self._release_pictures(rows.slots)
        self._last_slots = rows.slots
        self._saved.clear()
        step = staged.step
        if self.adapters is not None and (
            step.reset or step.new_sequences or len(step.freed_slots)
        ):
            self._settle_adapters(self.adapters, step.new_sequences)

    def _settle_adapters(self, adapters: AdapterStore, new: tuple[NewSequence, ...]) -> None:
        """Tells which preparations are used up, and which adapters the slots have."""
        found = (one.adapter for one in self.table.occupants if one is not None)
        running = [adapter.source.adapter_id for adapter in found if adapter is not None]
        adapters.settle([one.adapter_preparation for one in new], running)

    def _release_pictures(self, slots: IntColumn) -> None:
        """Lets go of what the encoder made for sequences that have computed their pictures."""
        columns, occupants = self.table.columns, self.table.occupants
        for slot in slots[columns["has_pictures"][slots]].tolist():
            occupant = occupants[slot]
            assert occupant is not None and occupant.pictures is not None  # it has pictures
            pictures = occupant.pictures
            if pictures.encoded and columns["num_computed"][slot] >= pictures.ends[-1]:
                occupants[slot] = replace(occupant, pictures=replace(pictures, encoded=()))

    def rollback(self) -> None:
        """The step failed: the state is as before it, and no rows are the previous ones."""
        for saved in reversed(self._saved):
            self.token_rows[saved.slot] = saved.token_row
            self.block_tables[saved.slot] = saved.block_tables
        self._saved.clear()
        self.forget_rows()
        self.grammars.give_up()

    def forget_rows(self) -> None:
        """Refuses same_rows until rows are named again: both sides may mean different ones."""
        self._last_slots = None
        self.sampled_last = None

    def state_hashes(self, staged: Staged) -> StateHashes:
        """Hashes of each live slot after a step; waits for the device and copies what it reads."""
        slots, num_computed, _ = staged.counts_after()
        width = int(staged.table.columns["num_blocks"][slots].max(initial=0))
        rows = torch.from_numpy(slots.astype(np.int64))
        last = torch.from_numpy(np.maximum(num_computed - 1, 0).astype(np.int64))
        tables = self.block_tables[rows, :width].cpu().numpy()
        tokens = self.token_rows[rows, last].cpu().numpy()
        sums = table_sums(tables, self._block_weights)
        return StateHashes(slots, slot_hashes(slots, sums, num_computed, tokens))

    def prompt_parts(self, staged: Staged) -> list[Part]:
        """The parts of prompts that this step computes and that are asked about, in batch order."""
        rows = staged.rows
        if rows.is_decode or not staged.table.columns["prompt_output_end"][rows.slots].any():
            return []
        columns = staged.table.columns[rows.slots]
        begins = np.maximum(columns["prompt_output_begin"], rows.num_computed)
        ends = np.minimum(columns["prompt_output_end"], rows.num_computed + rows.num_scheduled)
        parts = []
        for row in np.flatnonzero(begins < ends):
            slot, begin = int(rows.slots[row]), int(begins[row])
            first_row = int(rows.num_scheduled[:row].sum()) + begin - int(rows.num_computed[row])
            occupant = staged.table.occupants[slot]
            assert occupant is not None
            num_top = occupant.sampling.num_prompt_logprobs
            parts.append(Part(slot, begin, int(ends[row]), first_row, num_top))
        return parts

    def sampling_rows(self, staged: Staged) -> SamplingRows:
        """The sampling parameters of the rows that sample."""
        rows = staged.rows
        slots = rows.slots[rows.samples]
        num_tokens = staged.table.columns["num_tokens"][slots]
        if rows.drafts is not None:  # each draft's row samples as if those before it were known
            counts = 1 + rows.drafts.num_drafted[rows.samples]
            slots = np.repeat(slots, counts)
            num_tokens = runs(num_tokens, counts)
        columns = staged.table.columns[slots]
        output_position = num_tokens - columns["num_prompt"]
        is_short = output_position < columns["min_tokens"]
        asking = np.flatnonzero(columns["has_logprobs"])
        occupants = [staged.table.occupants[slot] for slot in slots[asking]]
        return SamplingRows(
            temperature=columns["temperature"].copy(),
            top_p=columns["top_p"].copy(),
            top_k=columns["top_k"].copy(),
            min_p=columns["min_p"].copy(),
            seed=columns["seed"].copy().view(np.int64),
            output_position=output_position,
            logits_processors=self._logits_processors(staged.table, slots, num_tokens, is_short),
            wanted=Wanted.of(asking, [one.sampling for one in occupants if one is not None]),
        )

    def _logits_processors(
        self,
        table: HostSlots,
        slots: IntColumn,
        num_tokens: IntColumn,
        is_short: NDArray[np.bool_],
    ) -> LogitsProcessors:
        """The processors of the rows that ask for any; for all others there is nothing to do."""
        rows = np.flatnonzero(table.columns["has_processors"][slots] | is_short)
        if not len(rows):
            return LogitsProcessors()
        slots = slots[rows]
        occupants = [table.occupants[slot] for slot in slots]
        processed = ProcessedRows(
            rows=rows,
            processors=[occupant.processors for occupant in occupants if occupant is not None],
            is_short=is_short[rows],
            slots=slots,
            num_prompt=table.columns["num_prompt"][slots],
            num_tokens=num_tokens[rows],
        )
        return collect(processed, self.token_rows, self.grammars, self.sampled_last)

    def _scatter(self, rows: Tensor, firsts: list[int], values: list[NDArray[np.int32]]) -> None:
        """Writes each of the values to where it starts in the flattened rows."""
        index = [first + np.arange(len(part)) for first, part in zip(firsts, values, strict=True)]
        self._put(rows, np.concatenate(index), np.concatenate(values))

    def _put(self, rows: Tensor, index: IntColumn, values: NDArray[np.integer]) -> None:
        where, what = upload(self.device, index, values)
        rows.view(-1).index_copy_(0, where, what.int())

    def _free(self, table: HostSlots, slots: IntColumn) -> None:
        empty = slots[table.columns["num_tokens"][slots] == 0]
        if len(empty):
            raise BadStep("freed_slots", f"slot {empty[0]} is empty")
        table.columns[slots] = np.zeros((), dtype=SLOT)
        if len(table.other_blocks):
            table.other_blocks[:, slots] = 0
        for slot in slots.tolist():
            table.occupants[slot] = None
            table.state_saves.pop(slot, None)

    def _enter(self, table: HostSlots, sequence: NewSequence, name: str) -> None:
        occupant = table.occupants[sequence.slot]
        if occupant is not None:
            raise BadStep(f"{name}.slot", f"slot {sequence.slot} holds {occupant.request_id!r}")
        self._check_tables(sequence, name)
        if sequence.num_computed_tokens > sequence.prompt_output_begin < sequence.prompt_output_end:
            raise BadStep(
                f"{name}.prompt_output_begin",
                f"{sequence.prompt_output_begin} is among the "
                f"{sequence.num_computed_tokens} tokens that are computed already",
            )
        sampling, place = sequence.sampling, None
        if sampling.grammar:
            output = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
            place = self.grammars.take_place(sequence.grammar_preparation, sampling.grammar, output)
        adapter = self._adapter_of(sequence, name)
        pictures = entering_pictures(sequence, self.pictures, name)
        processors = RowProcessors.of(sampling, place)
        table.occupants[sequence.slot] = Occupant(
            sequence.request_id, sampling, time.monotonic(), processors, adapter, pictures
        )
        table.columns[sequence.slot] = (
            len(sequence.token_ids),
            sequence.num_prompt_tokens,
            sequence.num_computed_tokens,
            len(sequence.block_ids),
            sampling.min_tokens,
            sampling.top_k,
            sampling.seed,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.has_processors,
            sampling.num_top_logprobs is not None,
            bool(sampling.grammar),
            sequence.prompt_only,
            bool(sampling.refusal),
            adapter is not None,
            0,
            pictures is not None,
            sequence.prompt_output_begin,
            sequence.prompt_output_end,
        )
        if sequence.group_block_ids:
            table.other_blocks[:, sequence.slot] = [len(ids) for ids in sequence.group_block_ids]

    def _adapter_of(self, sequence: NewSequence, name: str) -> LoadedAdapter | None:
        """The adapter of an entering sequence; None for the model alone. Raises BadStep."""
        if not (number := sequence.adapter_preparation):
            return None
        adapter = None if self.adapters is None else self.adapters.take(number)
        if adapter is None:
            raise BadStep(f"{name}.adapter_preparation", f"{number} is none that is ready")
        return adapter

    def _check_tables(self, sequence: NewSequence, name: str) -> None:
        num_computed = sequence.num_computed_tokens
        for group, block_ids in enumerate(tables_of(sequence)):
            at = f"{name}.group_block_ids[{group - 1}]" if group else f"{name}.block_ids"
            check_computed(self.tables.parts[group].group, len(block_ids), num_computed, at)

    def _append(self, table: HostSlots, step: StepInput) -> tuple[IntColumn, tuple[IntColumn, ...]]:
        """Counts appended blocks; returns where group 0's go in its tables, and others' in rows."""
        num_tokens, num_blocks = table.columns["num_tokens"], table.columns["num_blocks"]
        most = self.tables.parts[0].width
        appended_at = append(num_blocks, step.appended_slots, num_tokens, most)
        if not step.appended_to_groups:
            return appended_at, ()
        others = []
        for one in step.appended_to_groups:
            part, num_blocks = self.tables.parts[one.group], table.other_blocks[one.group - 1]
            others.append(part.begin + append(num_blocks, one.slots, num_tokens, part.width))
        return appended_at, tuple(others)

    def _rows(self, table: HostSlots, step: StepInput) -> Rows:
        slots, num_scheduled, name = step.slots, step.num_scheduled, "slots"
        if step.same_rows:
            if self._last_slots is None:
                raise BadStep("same_rows", "no previous step worked: name the rows")
            slots, name = self._last_slots, "same_rows"
        if len(num_scheduled) != len(slots):
            num_scheduled = np.ones(len(slots), dtype=np.int64)
        columns = table.columns[slots]
        ends = known_ends = columns["num_computed"] + num_scheduled
        refuse(columns["num_tokens"] == 0, name, slots, "is empty")
        drafts = drafts_of(step, columns, slots)
        if drafts is not None:
            known_ends = ends - drafts.num_drafted
        name = "same_rows" if step.same_rows else "num_scheduled"
        refuse(known_ends > columns["num_tokens"], name, slots, "has fewer tokens left to compute")
        if step.granted_steps:
            name = "granted_steps"
            refuse(ends < columns["num_tokens"], name, slots, "does not decode")
        last = ends + max(step.granted_steps - 1, 0)
        refuse(last > self.limits.max_model_len, name, slots, "would pass max_model_len")
        room = columns["num_blocks"] * self.limits.block_size
        refuse(last > room, name, slots, "has too few blocks for its tokens")
        if len(table.other_blocks):
            self._check_room(table, slots, last, name)
        samples = (known_ends == columns["num_tokens"]) & ~columns["prompt_only"]
        return Rows(slots, num_scheduled, columns["num_computed"], samples, drafts)

    def _check_room(self, table: HostSlots, slots: IntColumn, last: IntColumn, name: str) -> None:
        """Raises BadStep for a slot whose table of a group after group 0 ends before `last`."""
        for part, num_blocks in zip(self.tables.others, table.other_blocks, strict=True):
            room = num_blocks[slots] * part.group.block_size
            refuse(last > room, name, slots, "has too few blocks of a group for its tokens")
