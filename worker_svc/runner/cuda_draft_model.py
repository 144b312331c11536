"""A draft model on CUDA: a draft of all rows is one graph replay, and nothing waits for it.

Its graphs read the token rows and block tables of the model that it drafts for, where the drafts
are written, too. What a slot has sampled is counted apart: the target still has to verify it.
"""

from typing import Any

from worker_svc.attention.kv_cache import KVCache
from worker_svc.models import Decoder
from worker_svc.protocol.step import IntColumn, Limits
from worker_svc.runner import asked, inputs
from worker_svc.runner.batch_state import BatchState, HostSlots, Staged
from worker_svc.runner.device_sampling import sample_rows
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.draft_model import DraftModel
from worker_svc.runner.graphs.decode_graphs import DecodeGraphs
from worker_svc.runner.graphs.step_graphs import StepGraphs
from worker_svc.runner.rows import Rows


class CudaDraftModel(DraftModel):
    """A draft model of fused layers; valid as long as the state that it drafts for."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache, limits: Limits, state: BatchState
    ) -> None:
        super().__init__(decoder, kv_cache, limits)
        self._slots = SlotsOnDevice(state)
        self._decode_graphs = DecodeGraphs(decoder, kv_cache, self._slots, limits)
        self._step_graphs = StepGraphs(decoder, kv_cache, self._slots, limits)

    def capture(self, pool: Any, largest_only: bool = False) -> None:
        """Captures all graphs, or the largest of each kind."""
        self._step_graphs.capture(pool, largest_only)
        self._decode_graphs.capture(pool, largest_only)

    def forget(self) -> None:
        super().forget()
        self._decode_graphs.forget()

    def _enter(self, table: HostSlots, slots: IntColumn) -> None:
        self._slots.write(table, slots)

    def _fill(self, state: BatchState, chunk: Rows) -> None:
        step_map = self._step_graphs.map(chunk)
        if step_map is None:
            super()._fill(state, chunk)
        else:
            self._step_graphs.begin(step_map)

    def _sample(self, state: BatchState, staged: Staged) -> None:
        rows, columns = staged.rows, staged.table.columns
        is_plain = asked.are_plain(columns, rows.slots)
        filters = asked.may_filter(columns, rows.slots)
        if rows.is_decode and is_plain:
            self._decode_graphs.replay(rows.slots, rows.num_computed, filters)
            return
        step_map = self._step_graphs.map(rows)
        if step_map is None:
            part = self.decoder.vocab_part(self._last(inputs.build(state, rows)))
            sample_rows(self._slots, part, staged, state.sampling_rows(staged))
            return
        self._step_graphs.begin(step_map)
        if is_plain:
            self._step_graphs.sample(step_map, filters)
        else:
            logits = self._step_graphs.logits(step_map)
            sample_rows(self._slots, logits, staged, state.sampling_rows(staged))
