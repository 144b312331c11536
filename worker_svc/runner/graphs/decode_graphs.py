"""Decode steps as CUDA graphs: from the slots' newest tokens to the next ones in one launch.

Knows which batch sizes are captured and keeps the memory they read. A batch between two sizes runs
in the larger one, its rest filled with rows of no slot, which read and write nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.decode_inputs import DecodeInputs, gather_decode_inputs
from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.kv_cache import PagedCache
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.device.transfer import PinnedRing
from worker_svc.models.layer_stack import LayerStack
from worker_svc.models.step_model import StepModel
from worker_svc.protocol.step import IntColumn, Limits
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.graphs.adapter_batches import with_adapters
from worker_svc.runner.graphs.group_batches import with_groups

log = logging.getLogger(__name__)

NO_SLOT = -1


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes to capture: close together where a row more is dear, every 8 from there, the limit."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def size_for(sizes: tuple[int, ...], num_rows: int) -> int:
    """The smallest captured size that holds the rows."""
    return sizes[int(np.searchsorted(sizes, num_rows))]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The target of a capture."""

    size: int
    filters: bool  # whether a row may filter what it samples from
    adapts: bool  # whether a row may have an adapter


class DecodeGraphs:
    """Graphs of one runner, valid as long as its cache, its slots and its model stay in place."""

    def __init__(
        self, model: StepModel, kv_cache: PagedCache, slots: SlotsOnDevice, limits: Limits
    ) -> None:
        assert model.stack is not None  # else steps go to an EagerRunner
        self._model = model
        # Stacks by whether their rows may have adapters.
        self._layers: dict[bool, LayerStack] = {False: model.stack}
        if model.adapted is not None:
            self._layers[True] = model.adapted
        self._few_layers = {adapts: stack.rehearsed() for adapts, stack in self._layers.items()}
        self._kv_cache = kv_cache
        self._slots = slots
        self._limits = limits
        self.sizes = batch_sizes(limits.max_decode_rows)
        self._inputs = DecodeInputs.empty(self.sizes[-1], slots.tables.width, slots.device)
        self._batch_slots = torch.full(
            (self.sizes[-1],), NO_SLOT, dtype=torch.int32, device=slots.device
        )
        self._ring = PinnedRing(self.sizes[-1], slots.device)
        self._loaded: IntColumn | None = None  # the rows whose slots the device holds
        self._places: IntColumn = np.empty(0, dtype=np.int64)  # of these rows in the batch
        self._graphs: dict[_Variant, torch.cuda.CUDAGraph] = {}

    def rehearsals(self) -> list[Callable[[], None]]:
        """Everything that `capture` captures, as calls that run it without a request."""
        return [partial(self._rehearse, size, adapts) for adapts, size in self._kinds(self.sizes)]

    def capture(self, pool: Any, largest_only: bool = False) -> None:
        """Captures all sizes, or the largest; that one first, since it decides the memory."""
        started = time.perf_counter()
        self._batch_slots.fill_(NO_SLOT)
        self._loaded = None
        with capturing(self._slots.device):
            sizes = self.sizes[-1:] if largest_only else self.sizes[::-1]
            for adapts, size in self._kinds(sizes):
                # This compiles, and lets the libraries make their workspaces.
                self._rehearse(size, adapts)
                for filters in (False, True):
                    variant = _Variant(size, filters, adapts)
                    self._graphs[variant] = captured(partial(self._step, variant), pool)
        log.info("%d graphs captured in %.1f s", len(self._graphs), time.perf_counter() - started)

    def _kinds(self, sizes: Sequence[int]) -> list[tuple[bool, int]]:
        """All that is captured: whether rows have adapters, and how many rows there are."""
        return [(adapts, size) for adapts in self._layers for size in sizes]

    def replay(
        self, slots: IntColumn, lengths: IntColumn, filters: bool, *, adapts: bool = False
    ) -> IntColumn:
        """One decode step of the rows in these slots, with contexts of about these lengths.

        Returns each row's place in the batch: its token is there in the ring's row.
        """
        size = size_for(self.sizes, len(slots))
        if self._loaded is None or not np.array_equal(slots, self._loaded):
            self._load(slots, lengths)
        self._graphs[_Variant(size, filters, adapts)].replay()
        return self._places

    def forget(self) -> None:
        """The batch's slots on the device may be anything: a launch has failed."""
        self._loaded = None

    def _load(self, slots: IntColumn, lengths: IntColumn) -> None:
        # Longest first: attention starts rows in this order, and a long one that starts last would
        # run on alone. All grow alike from here on, so the order stays good.
        order = np.argsort(-lengths, kind="stable")
        self._places = np.empty_like(order)
        self._places[order] = np.arange(len(order))
        padded = np.full(len(self._batch_slots), NO_SLOT, dtype=np.int32)
        padded[: len(slots)] = slots[order]
        self._ring.send(padded, self._batch_slots)
        self._loaded = slots

    def _rehearse(self, size: int, adapts: bool) -> None:
        """Everything that a graph of this size launches, but for most layers."""
        part = self._model.vocab_part(self._forward(self._few_layers[adapts], size))
        for filters in (False, True):
            self._slots.draw(part, self._batch_slots[:size], filters)

    def _step(self, variant: _Variant) -> None:
        part = self._model.vocab_part(self._forward(self._layers[variant.adapts], variant.size))
        self._slots.draw(part, self._batch_slots[: variant.size], variant.filters)

    def _forward(self, layers: LayerStack, size: int) -> Tensor:
        """The newest tokens of the batch's first slots -> hidden states [size, hidden]."""
        held = self._slots
        rows, inputs = self._batch_slots[:size], self._inputs.first(size)
        gather_decode_inputs(
            rows, held.slot_state, held.token_rows, held.block_tables, self._limits.block_size,
            held.num_steps, inputs,
        )  # fmt: skip
        batch = AttentionBatch.of_decodes(
            inputs.slot_mapping,
            inputs.block_tables[:, held.tables.parts[0].columns],
            inputs.context_lens,
            self._limits.max_model_len,
            rows,
        )
        batch = with_groups(batch, held, rows, inputs.positions)
        batch = with_adapters(batch, layers, held, rows, size)
        return layers.forward(inputs.token_ids, inputs.positions, self._kv_cache, batch)
