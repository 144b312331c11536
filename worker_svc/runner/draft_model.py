"""A smaller model of the same vocabulary that drafts for the rows of a step.

Its KV lies in a cache of its own under the target's block ids, so block tables, shared prefixes,
forks and swaps hold for both. It is computed only where rows draft: each block counts the tokens
that it holds KV of here, and a row that drafts first catches up. What is missing or wrong here
costs accepted drafts, never a token, since the target verifies every one.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.attention.kv_cache import KVCache
from worker_svc.device.transfer import fetched, upload
from worker_svc.models import Decoder
from worker_svc.protocol.step import IntColumn, Limits, StepInput
from worker_svc.runner import inputs
from worker_svc.runner.batch_state import BatchState, HostSlots, Staged
from worker_svc.runner.block_mover import BlockMover
from worker_svc.runner.filled_blocks import FilledBlocks
from worker_svc.runner.rows import RowDrafts, Rows, runs
from worker_svc.sampling.sampler import sample_part


@dataclass(frozen=True, slots=True)
class _Drafting:
    """The rows of a step that draft."""

    which: IntColumn  # [B] of the step's rows
    slots: IntColumn  # [B]
    tables: NDArray[np.int32]  # [B, W]
    begins: IntColumn  # [B] tokens with KV here, before the step
    num_known: IntColumn  # [B]
    num_drafted: IntColumn  # [B]


class DraftModel:
    """The model with its KV cache. Only the compute thread uses it."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, limits: Limits) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.limits = limits
        self._mover = BlockMover(kv_cache, limits.num_host_blocks, decoder.device)
        self._filled = FilledBlocks(limits)
        self._drafting: _Drafting | None = None  # from `draft` to `settle`
        self._found: Tensor | None = None  # the drafts, on the host once the step is done

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

    def capture(self, pool: Any, largest_only: bool = False) -> None:
        """Captures what it replays, if it replays anything; `pool` is the graphs' memory."""

    def draft(self, state: BatchState, staged: Staged, drafts: RowDrafts) -> None:
        """Writes the drafts of a step to the token rows, or launches what does.

        Each is what the row's own parameters and noise draw from this model's logits.
        """
        self._drafting = row = self._rows_that_draft(state, staged, drafts)
        table = staged.table.copy()
        table.columns["has_logprobs"] = False
        self._enter(table, row.slots)
        begins = self._catch_up(state, row)
        for place in range(int(row.num_drafted.max())):
            now = np.flatnonzero(row.num_drafted > place)
            slots, ends = row.slots[now], row.num_known[now] + place
            chunk = Rows(slots, ends - begins[now], begins[now], _all(now))
            table.columns["num_tokens"][slots] = ends
            self._sample(state, replace(staged, table=table, rows=chunk))
            begins[now] = ends
        firsts = row.slots * state.token_rows.shape[1] + row.num_known
        (index,) = upload(state.device, runs(firsts, row.num_drafted))
        self._found = fetched(state.token_rows.view(-1).index_select(0, index))

    def read(self, drafts: RowDrafts) -> None:
        """Fills in what `draft` found; call it once the step is done."""
        if self._found is not None:
            drafts.token_ids[:] = self._found.numpy()
            self._found = None

    def settle(self, drafts: RowDrafts) -> None:
        """Takes note of what `draft` computed, once it is known which drafts came true."""
        if (row := self._drafting) is None:
            return
        # The last draft is sampled here, and computed by the target alone.
        num_right = np.minimum(drafts.num_accepted[row.which], row.num_drafted - 1)
        self._filled.fill(row.tables, row.begins, row.num_known + num_right)
        self._drafting = None

    def forget(self) -> None:
        """The step has failed: what was drafted is of no step."""
        self._drafting = self._found = None

    def _rows_that_draft(self, state: BatchState, staged: Staged, drafts: RowDrafts) -> _Drafting:
        rows = staged.rows
        which = np.flatnonzero(drafts.num_drafted)
        num_known, num_drafted = rows.known_ends[which], drafts.num_drafted[which]
        width = -(-int((num_known + num_drafted).max()) // self.limits.block_size)
        tables = state.block_tables[:, :width].cpu().numpy()[rows.slots[which]]
        # The last known token is always computed: the first draft is sampled after it.
        begins = np.minimum(self._filled.num_filled(tables), num_known - 1)
        return _Drafting(which, rows.slots[which], tables, begins, num_known, num_drafted)

    def _catch_up(self, state: BatchState, row: _Drafting) -> IntColumn:
        """Computes what is missing here before a last piece that fits into one forward pass.

        Returns where each row's last piece begins.
        """
        begins, budget = row.begins.copy(), self.limits.max_num_batched_tokens
        while (left := row.num_known - begins).sum() > budget:
            before = np.cumsum(left) - left
            chunks = np.clip(budget - before, 0, left - 1)
            now = np.flatnonzero(chunks)
            self._fill(state, Rows(row.slots[now], chunks[now], begins[now], ~_all(now)))
            begins += chunks
        return begins

    def _enter(self, table: HostSlots, slots: IntColumn) -> None:
        """Before the first draft of the sequences in these slots [B]."""

    def _fill(self, state: BatchState, chunk: Rows) -> None:
        """Computes tokens of which none is sampled after."""
        self.forward(inputs.build(state, chunk))

    def _sample(self, state: BatchState, staged: Staged) -> None:
        """Samples a token for each row [B] of a step, and writes it to its token row."""
        model_inputs = inputs.build(state, staged.rows)
        sampling = state.sampling_rows(staged)
        sampled = sample_part(self.decoder.vocab_part(self._last(model_inputs)), sampling)
        state.write_sampled(staged.rows, sampled.token_ids)

    def _last(self, model_inputs: inputs.ModelInputs) -> Tensor:
        """Hidden states [B, hidden] of the tokens that are sampled after."""
        hidden = self.forward(model_inputs)
        if model_inputs.logit_rows is None:
            return hidden
        return hidden.index_select(0, model_inputs.logit_rows)


def _all(rows: IntColumn) -> NDArray[np.bool_]:
    return np.ones(len(rows), dtype=np.bool_)
