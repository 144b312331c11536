"""The slots on the device, so that a decode step needs no data from the host.

A row of `slot_state` has a slot's token counts and sampling parameters; tokens and block tables are
in the batch state. Every step that samples has a number; its tokens are in the ring's row of that
number, in memory that host and device share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.enter_slots import HEADER_WORDS, STATE_AT, enter_slots
from kernels.sampling.filtered_draw import draw_filtered
from kernels.sampling.penalties import penalize
from kernels.sampling.restrict_rows import restrict_rows
from kernels.sampling.sample import (
    RING,
    Tokens,
    best_tokens,
    choose,
    find_candidates,
    output_ring,
)
from kernels.sampling.slot_state import (
    ADAPTER,
    MIN_P,
    NUM_FIELDS,
    NUM_PROMPT,
    NUM_TOKENS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from wire.state_hash import StateHashes, block_weights, slot_hashes
from worker_svc.device.transfer import fetched, upload, upload_array
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import IntColumn
from worker_svc.runner.batch_state import BatchState, HostSlots, Staged
from worker_svc.runner.block_tables import entering_blocks
from worker_svc.runner.rows import Rows
from worker_svc.sampling.logits_processors import History, Penalties


class SlotsOnDevice:
    """Mirrors the batch state's table. Only the compute thread changes it."""

    def __init__(self, state: BatchState) -> None:
        self.device = state.device
        self.token_rows = state.token_rows
        self.tables = state.tables  # the columns of block_tables, by KV group
        self.block_tables = state.block_tables
        max_num_seqs = state.limits.max_num_seqs
        self._table_parts: Tensor | None = None  # for `enter_slots`
        if self.tables.others:
            columns = [(part.begin, part.width) for part in self.tables.parts]
            self._table_parts = torch.tensor(columns, dtype=torch.int32, device=self.device)
        self.slot_state = torch.zeros(
            (max_num_seqs, NUM_FIELDS.value), dtype=torch.int64, device=self.device
        )
        self.num_steps = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.ring = output_ring(max_num_seqs, self.device)
        self._tokens = Tokens(self.slot_state, self.token_rows, self.num_steps, self.ring)
        self.no_masks = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        self._num_launched = 0
        self._vocab_size = state.limits.vocab_size
        weights = block_weights(state.limits.max_blocks_per_seq).view(np.int64)
        self._block_weights = torch.from_numpy(weights).to(self.device)

    def write(self, table: HostSlots, slots: IntColumn) -> None:
        """Updates slots on the device from the table."""
        if len(slots):
            index, rows = upload(self.device, slots, _rows(table.columns[slots]).reshape(-1))
            self.slot_state.index_copy_(0, index, rows.view(len(slots), -1))

    def entering(self, staged: Staged) -> NDArray[np.int32]:
        """The output of `enter_slots` for a step's new sequences."""
        new = staged.step.new_sequences
        slots = np.array([sequence.slot for sequence in new], dtype=np.int64)
        return entering_words(
            slots,
            [sequence.token_ids for sequence in new],
            [entering_blocks(sequence) for sequence in new],
            _rows(staged.table.columns[slots]),
        )

    def enter(self, staged: Staged) -> None:
        """Writes the rows of a step's new sequences: one copy, one kernel."""
        words = upload_array(self.device, self.entering(staged))
        self.write_entering(words, len(staged.step.new_sequences))

    def write_entering(self, words: Tensor, most: int, count: Tensor | None = None) -> None:
        """The kernel alone, for words that are on the device; see `enter_slots`."""
        rows = self.token_rows, self.block_tables, self.slot_state
        enter_slots(words, most, *rows, count, self._table_parts)

    def rehearse(self) -> None:
        """Lets a sequence enter no slot, penalizes one without tokens, and restricts no row."""
        words = torch.zeros(HEADER_WORDS, dtype=torch.int32, device=self.device)
        self.write_entering(words.sub_(1), 1)
        none, off = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
        history = History(self.token_rows, none, none, none)
        logits = torch.zeros((1, self._vocab_size), device=self.device)
        self.penalize(logits, Penalties(none, off, off, off + 1, history))
        first, all_of_it = upload(self.device, none, none - 1)
        restrict_rows(logits, first, all_of_it, first == 0, self.no_masks)

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """Applies penalties to logits [R, V] float32 in place: one copy, one kernel."""
        for part in penalties.parts():
            history = part.history
            rows = np.stack((part.rows, history.slots, history.num_prompt, history.num_tokens))
            factors = np.stack((part.presence, part.frequency, part.repetition))
            words = np.concatenate((rows.astype(np.int32), factors.view(np.int32)))  # [7, N]
            there = upload_array(self.device, words)
            longest = max(1, int(history.num_tokens.max()))
            factors_there = there[4:].view(torch.float32)
            penalize(logits, self.token_rows, there[:4], factors_there, longest)

    def sample(self, part: VocabPart, slots: Tensor, filters: bool) -> None:
        """Samples one row of logits for each of slots [R] int32, as a step of its own."""
        self.num_steps.add_(1)
        self.draw(part, slots, filters)

    def draw(self, part: VocabPart, slots: Tensor, filters: bool) -> None:
        """Samples for slots [R] int32 as step `num_steps`; without `filters`, no row filters.

        Then ranks exchange the best of their parts of the vocabulary, not the logits.
        """
        choose(_candidates(part, slots, self.slot_state, filters), slots, self._tokens)

    def next_places(self, staged: Staged, which: IntColumn) -> IntColumn:
        """The places in the flat token rows of the tokens of some of a step's sampling rows."""
        slots = staged.rows.slots[staged.rows.samples][which]
        ends: IntColumn = staged.table.columns["num_tokens"][slots]
        return slots * self.token_rows.shape[1] + ends

    def guess(self, part: VocabPart, slots: Tensor) -> Tensor:
        """The tokens [R] int32 that slots [R] int32 without filters would sample; none changes.

        -1 where logits are not finite.
        """
        return best_tokens(_candidates(part, slots, self.slot_state, filters=False))

    def sample_at(
        self, part: VocabPart, slots: IntColumn, num_known: IntColumn, filters: bool
    ) -> Tensor:
        """Tokens [R] int32 after so many known ones [R] of each slot [R]; no slot changes.

        A slot may repeat. -1 where logits are not finite.
        """
        index, counts = upload(self.device, slots, num_known)
        state = self.slot_state.index_select(0, index)  # [R, NUM_FIELDS]
        state[:, NUM_TOKENS.value] = counts
        rows = torch.arange(len(slots), dtype=torch.int32, device=self.device)
        return best_tokens(_candidates(part, rows, state, filters))

    def advance(self, rows: Rows) -> None:
        """Counts the tokens that a step's rows made known, once its drafts are verified."""
        where = rows.slots * NUM_FIELDS.value + NUM_TOKENS.value
        index, counts = upload(
            self.device, where[rows.samples], (rows.known_ends + rows.num_sampled)[rows.samples]
        )
        self.slot_state.view(-1).index_copy_(0, index, counts)

    def count(self) -> int:
        """Counts a launched step that samples; returns the ring row of its tokens."""
        self._num_launched += 1
        return self._num_launched % RING

    def restore(self, table: HostSlots) -> None:
        """Restores the device's state from the host's, after a failed launch or a rehearsal."""
        self.write(table, np.arange(len(table.columns)))
        self.num_steps.fill_(self._num_launched)

    def look(self, staged: Staged) -> "SlotSnapshot":
        """Copies the state of live slots for a hash, as it is after the launched steps."""
        slots, num_computed, num_tokens = staged.counts_after()
        last = slots * self.token_rows.shape[1] + np.maximum(num_computed - 1, 0)
        index, where = upload(self.device, slots, last)
        tables = self.block_tables[:, self.tables.parts[0].columns]
        held = torch.stack(
            (
                (tables[index] * self._block_weights).sum(1),
                self.token_rows.view(-1)[where].long(),
                self.slot_state[index, NUM_TOKENS.value],
            )
        )  # [3, live slots]
        return SlotSnapshot(slots, num_computed, num_tokens, fetched(held))

    def tokens(self, ring_row: int, num_rows: int) -> NDArray[np.int32]:
        """The tokens [num_rows] of a finished step; -1 for rows that were not finite."""
        return np.array(self.ring[ring_row, :num_rows].numpy())


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """Live slots after a step: the host's counts, and the device's values."""

    slots: IntColumn
    num_computed: IntColumn
    num_tokens: IntColumn
    held: Tensor  # [3, slots] in the host's memory: table sum, last computed token, known tokens

    def hashes(self) -> StateHashes:
        """The hashes; call it when the step has finished."""
        sums, token_ids, num_tokens = self.held.numpy()
        # The device counts known tokens only; computed ones differ from the host's count as they
        # do.
        num_computed = self.num_computed + num_tokens - self.num_tokens
        hashes = slot_hashes(self.slots, sums.view(np.uint64), num_computed, token_ids)
        return StateHashes(self.slots, hashes)


def _candidates(part: VocabPart, slots: Tensor, slot_state: Tensor, filters: bool) -> Tensor:
    """Candidates [P, 2, R, T] of all ranks for rows of `slot_state` [S, NUM_FIELDS]."""
    if filters:
        part = VocabPart(part.whole())
    found = find_candidates(part.logits, slots, slot_state, part.first_token)
    if filters:
        draw_filtered(part.logits, found, slots, slot_state)
    return part.group.gather(found)


def entering_words(
    slots: IntColumn,
    token_ids: Sequence[NDArray[np.int32]],
    block_ids: Sequence[NDArray[np.int32]],
    numbers: NDArray[np.int64],
) -> NDArray[np.int32]:
    """The input of `enter_slots`: the sequences' headers, then their tokens, then their blocks.

    `block_ids` are those of `entering_blocks`.
    """
    parts = (*token_ids, *block_ids)
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    headers = np.zeros((len(slots), HEADER_WORDS), dtype=np.int32)
    starts = headers.size + np.cumsum(lengths) - lengths
    both = slice(len(slots)), slice(len(slots), None)  # tokens, blocks
    headers[:, 0] = slots
    headers[:, 1], headers[:, 2] = starts[both[0]], lengths[both[0]]
    headers[:, 3], headers[:, 4] = starts[both[1]], lengths[both[1]]
    headers[:, STATE_AT:] = numbers.view(np.int32)
    return np.concatenate([headers.reshape(-1), *parts], dtype=np.int32)


def _rows(columns: NDArray[np.void]) -> NDArray[np.int64]:
    rows = np.zeros((len(columns), NUM_FIELDS.value), dtype=np.int64)
    for field, name in (
        (NUM_TOKENS, "num_tokens"),
        (NUM_PROMPT, "num_prompt"),
        (TOP_K, "top_k"),
        (ADAPTER, "adapter_place"),
    ):
        rows[:, field.value] = columns[name]
    rows[:, SEED.value] = columns["seed"].astype(np.uint64).view(np.int64)
    for field, name in ((TEMPERATURE, "temperature"), (TOP_P, "top_p"), (MIN_P, "min_p")):
        rows[:, field.value] = columns[name].astype(np.float32).view(np.int32)
    return rows
