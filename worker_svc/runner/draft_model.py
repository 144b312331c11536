"""A smaller model of the same vocabulary that drafts for the rows of a step.

Its KV lies in a cache of its own under the target's block ids, so block tables, shared prefixes,
forks and swaps hold for both. It is computed only where rows draft: each block counts the tokens
that it holds KV of here, and a row that drafts first catches up. What is missing or wrong here
costs accepted drafts, never a token, since the target verifies every one.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.attention.kv_cache import KVCache
from worker_svc.models import Decoder
from worker_svc.protocol.step import IntColumn, Limits, StepInput
from worker_svc.runner import inputs
from worker_svc.runner.batch_state import BatchState, Staged
from worker_svc.runner.block_mover import BlockMover
from worker_svc.runner.rows import RowDrafts, Rows
from worker_svc.sampling.sampler import SamplingRows, sample_part


class FilledBlocks:
    """How many tokens of each block, on the device and on the host, have their KV here."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._device = np.zeros(limits.num_blocks, dtype=np.int64)
        self._host = np.zeros(limits.num_host_blocks, dtype=np.int64)
        self._device[0] = limits.block_size  # the null block: its KV is never read

    def apply(self, step: StepInput) -> None:
        """Follows a step's changes. If it fails, less is known to be there than is."""
        if step.reset:
            self._device[1:] = self._host[:] = 0
        if (moves := step.moves) is not None:
            self._host[moves.to_host] = self._device[moves.swapped_out]
            self._device[moves.swapped_in] = self._host[moves.from_host]
            self._device[moves.copied_to] = self._device[moves.copied_from]
        self._device[step.appended_block_ids] = 0
        for sequence in step.new_sequences:
            full, rest = divmod(sequence.num_computed_tokens, self._block_size)
            if rest:  # its own block: what it was copied from may have gone on in another way
                last = sequence.block_ids[full]
                self._device[last] = min(self._device[last], rest)
            self._device[sequence.block_ids[full + (rest > 0) :]] = 0
        self._device[0] = self._block_size

    def num_filled(self, tables: NDArray[np.int32]) -> IntColumn:
        """Tokens [B] at the head of each block table [B, W] that have their KV here."""
        filled = self._device[tables]  # [B, W]
        is_full = (filled == self._block_size).cumprod(axis=1)
        num_full = is_full.sum(axis=1)
        after = np.append(filled, np.zeros((len(tables), 1), dtype=np.int64), axis=1)
        first_gap = after[np.arange(len(tables)), num_full]
        return np.asarray(num_full * self._block_size + first_gap, dtype=np.int64)

    def fill(self, tables: NDArray[np.int32], begins: IntColumn, ends: IntColumn) -> None:
        """The tokens from `begins` [B] to `ends` [B] of block tables [B, W] have it now."""
        firsts = np.arange(tables.shape[1]) * self._block_size  # [W]
        counts = np.clip(ends[:, None] - firsts, 0, self._block_size)
        is_new = (counts > 0) & (firsts + self._block_size > begins[:, None])
        self._device[tables[is_new]] = counts[is_new]
        self._device[0] = self._block_size


@dataclass(frozen=True, slots=True)
class _Drafting:
    """The rows of a step that draft."""

    which: IntColumn  # [B] of the step's rows
    tables: NDArray[np.int32]  # [B, W]
    begins: IntColumn  # [B] tokens with KV here, before the step
    num_known: IntColumn  # [B]
    num_drafted: IntColumn  # [B]


@dataclass(slots=True)
class DraftModel:
    """The model with its KV cache. Only the compute thread uses it."""

    decoder: Decoder
    kv_cache: KVCache
    limits: Limits
    _mover: BlockMover = field(init=False)
    _filled: FilledBlocks = field(init=False)
    _drafting: _Drafting | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        num_host_blocks = self.limits.num_host_blocks
        self._mover = BlockMover(self.kv_cache, num_host_blocks, self.decoder.device)
        self._filled = FilledBlocks(self.limits)

    def apply(self, step: StepInput) -> None:
        """Moves blocks as the step moves the target's."""
        self._filled.apply(step)
        if step.moves is not None:
            self._mover.apply(step.moves)

    def forward(self, model_inputs: inputs.ModelInputs) -> Tensor:
        """Hidden states [T, hidden]; writes the tokens' KV."""
        return self.decoder.forward(
            model_inputs.token_ids,
            model_inputs.positions,
            self.kv_cache,
            model_inputs.attention,
        )

    def draft(self, state: BatchState, staged: Staged, drafts: RowDrafts) -> None:
        """Fills in the drafts of a step, and writes them to the token rows.

        Each is what the row's own parameters and noise draw from this model's logits.
        """
        self._drafting = row = self._rows_that_draft(state, staged, drafts)
        slots = staged.rows.slots[row.which]
        begins = self._catch_up(state, slots, row)
        found = np.zeros((len(slots), int(row.num_drafted.max())), dtype=np.int64)
        table = staged.table.copy()
        table.columns["has_logprobs"] = False
        for place in range(found.shape[1]):
            now = np.flatnonzero(row.num_drafted > place)
            ends = row.num_known[now] + place
            chunk = Rows(slots[now], ends - begins[now], begins[now], _all(now))
            table.columns["num_tokens"][slots[now]] = ends
            sampling = state.sampling_rows(replace(staged, table=table, rows=chunk))
            found[now, place] = self._sample(state, chunk, sampling)
            begins[now] = ends
        is_made = np.arange(found.shape[1]) < row.num_drafted[:, None]
        drafts.token_ids[:] = found[is_made]

    def settle(self, drafts: RowDrafts) -> None:
        """Takes note of what `draft` computed, once it is known which drafts came true."""
        if (row := self._drafting) is None:
            return
        # The last draft is sampled here, and computed by the target alone.
        num_right = np.minimum(drafts.num_accepted[row.which], row.num_drafted - 1)
        self._filled.fill(row.tables, row.begins, row.num_known + num_right)
        self._drafting = None

    def _rows_that_draft(self, state: BatchState, staged: Staged, drafts: RowDrafts) -> _Drafting:
        rows = staged.rows
        which = np.flatnonzero(drafts.num_drafted)
        num_known, num_drafted = rows.known_ends[which], drafts.num_drafted[which]
        width = -(-int((num_known + num_drafted).max()) // self.limits.block_size)
        tables = state.block_tables[:, :width].cpu().numpy()[rows.slots[which]]
        # The last known token is always computed: the first draft is sampled after it.
        begins = np.minimum(self._filled.num_filled(tables), num_known - 1)
        return _Drafting(which, tables, begins, num_known, num_drafted)

    def _catch_up(self, state: BatchState, slots: IntColumn, row: _Drafting) -> IntColumn:
        """Computes what is missing here before a last piece that fits into one forward pass.

        Returns where each row's last piece begins.
        """
        begins, budget = row.begins.copy(), self.limits.max_num_batched_tokens
        while (left := row.num_known - begins).sum() > budget:
            before = np.cumsum(left) - left
            chunks = np.clip(budget - before, 0, left - 1)
            now = np.flatnonzero(chunks)
            chunk = Rows(slots[now], chunks[now], begins[now], ~_all(now))
            self.forward(inputs.build(state, chunk))
            begins += chunks
        return begins

    def _sample(self, state: BatchState, chunk: Rows, sampling: SamplingRows) -> NDArray[np.int64]:
        """One token for each row [B], also written to its token row."""
        model_inputs = inputs.build(state, chunk)
        hidden = self.forward(model_inputs)
        if model_inputs.logit_rows is not None:
            hidden = hidden.index_select(0, model_inputs.logit_rows)
        sampled = sample_part(self.decoder.vocab_part(hidden), sampling)
        state.write_sampled(chunk, sampled.token_ids)
        token_ids: NDArray[np.int64] = sampled.token_ids.cpu().numpy()
        return token_ids


def _all(rows: IntColumn) -> NDArray[np.bool_]:
    return np.ones(len(rows), dtype=np.bool_)
