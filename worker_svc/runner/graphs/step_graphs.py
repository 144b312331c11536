"""Steps with prompts as CUDA graphs: two launches, whatever their rows are.

The first graph, of a number of tokens, computes everything before the last layer's attention; the
second, of a number of rows, what is left for the tokens that are sampled after, and samples. So a
graph for each number of tokens and one for each number of rows serve every combination. Lengths
and places come in one buffer that is copied to the device before.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.adapters.group_rows import TokenColumns
from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import tokens_per_tile
from kernels.sampling.step_inputs import StepColumns, StepInputs, gather_last, gather_step_inputs
from worker_svc.attention.batch import AttentionBatch, MixedBatch
from worker_svc.attention.kv_cache import PagedCache
from worker_svc.device.capture_stream import captured, capturing
from worker_svc.device.transfer import PinnedRing
from worker_svc.models.layer_stack import LayerStack
from worker_svc.models.step_model import StepModel
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import Limits
from worker_svc.runner.device_sampling import PlacedLogits
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.graphs.adapter_batches import with_adapters
from worker_svc.runner.graphs.decode_graphs import size_for
from worker_svc.runner.graphs.group_batches import sequences_of, with_groups
from worker_svc.runner.graphs.state_batches import with_states
from worker_svc.runner.graphs.step_map import (
    ENTERING_WORDS,
    MAX_ENTERING,
    Layout,
    StepMap,
    bucket_sizes,
    map_step,
    max_tiles,
    spread,
)
from worker_svc.runner.rows import Rows

log = logging.getLogger(__name__)


def decode_sizes(max_decode_rows: int) -> tuple[int, ...]:
    """Numbers of decoding rows that ask for more than a token: powers of two, and the limit."""
    return tuple(size for size in row_sizes(max_decode_rows) if size >= min(8, max_decode_rows))


def row_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sampling rows to capture: powers of two, and the limit."""
    powers = {1 << n for n in range(max_num_seqs.bit_length())}
    return tuple(sorted(powers | {max_num_seqs}))


@dataclass(frozen=True, slots=True)
class _Ending:
    """The target of a capture of the second kind."""

    num_rows: int
    filters: bool | None  # whether a row may filter what it samples from; None: nothing is sampled
    adapts: bool  # whether a row may have an adapter


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The target of a capture of the first kind."""

    size: int  # tokens
    is_decode: bool  # one token of each sequence, all sampling
    adapts: bool


class StepGraphs:
    """Graphs of one runner, valid as long as its cache, its slots and its model stay in place."""

    def __init__(
        self, model: StepModel, kv_cache: PagedCache, slots: SlotsOnDevice, limits: Limits
    ) -> None:
        assert model.stack is not None  # else steps go to an EagerRunner
        self._model = model
        # Stacks by whether their rows may have adapters; those without come first.
        self._layers: dict[bool, LayerStack] = {False: model.stack}
        if model.adapted is not None:
            self._layers[True] = model.adapted
        self._few_layers = {adapts: stack.rehearsed() for adapts, stack in self._layers.items()}
        self._kv_cache = kv_cache
        self._slots = slots
        self._limits = limits
        self.sizes = bucket_sizes(limits.max_step_tokens)
        self.row_sizes = row_sizes(limits.max_num_seqs)
        self.decode_sizes = decode_sizes(min(limits.max_decode_rows, self.sizes[-1]))
        heads = model.stack.tile_heads
        both, itemsize = (heads.num_heads, heads.num_kv_heads), model.dtype.itemsize
        self._tile_tokens = {
            size: tokens_per_tile(size, both, heads.head_dim, itemsize) for size in self.sizes
        }
        most_tiles = max(max_tiles(*size) for size in self._tile_tokens.items())
        self._layout = Layout(limits.max_num_seqs, most_tiles)
        device, most = slots.device, limits.max_num_seqs
        num_words = self._layout.num_words + ENTERING_WORDS
        self._ring = PinnedRing(num_words, device)
        buffer = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._buffer, self._columns = buffer, self._layout.columns(buffer)
        self._entering = buffer[self._layout.num_words :]
        self._inputs = StepInputs.empty(self.sizes[-1], most, slots.tables.width, device)
        # What goes from the first graph to the second.
        self._carried = tuple(
            torch.zeros((most, width), dtype=model.dtype, device=device)
            for width in model.stack.carried_widths
        )
        self._beginnings: dict[_Beginning, torch.cuda.CUDAGraph] = {}
        self._endings: dict[_Ending, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, VocabPart] = {}  # of the endings that sample nothing

    def rehearsals(self) -> list[Callable[[], None]]:
        """Everything that `capture` captures, as calls that run it without a request."""
        return [
            call
            for adapts, few in self._few_layers.items()
            for call in (
                *(partial(self._begin, few, size) for size in self.sizes),
                *(partial(self._rehearse_end, num_rows, adapts) for num_rows in self.row_sizes),
            )
        ]

    def capture(self, pool: Any, largest_only: bool = False) -> None:
        """Captures all graphs, or the largest of each kind, those first: they decide the memory."""
        started = time.perf_counter()
        self._forget()
        with capturing(self._slots.device):
            for adapts in self._layers:
                for is_decode, sizes in ((False, self.sizes), (True, self.decode_sizes)):
                    for size in _largest_first(sizes, largest_only):
                        self._capture_beginning(_Beginning(size, is_decode, adapts), pool)
                for num_rows in _largest_first(self.row_sizes, largest_only):
                    self._rehearse_end(num_rows, adapts)
                    for filters in (None, False, True):
                        ending = _Ending(num_rows, filters, adapts)
                        self._endings[ending] = captured(partial(self._end, ending), pool)
        number = len(self._beginnings) + len(self._endings)
        log.info("%d graphs of steps captured in %.1f s", number, time.perf_counter() - started)

    def _capture_beginning(self, beginning: _Beginning, pool: Any) -> None:
        size, is_decode, adapts = beginning.size, beginning.is_decode, beginning.adapts
        # This compiles, and lets the libraries make their workspaces.
        self._begin(self._few_layers[adapts], size, is_decode)
        begin = partial(self._begin, self._layers[adapts], size, is_decode)
        self._beginnings[beginning] = captured(begin, pool)

    def map(self, rows: Rows) -> StepMap | None:
        """The places of the rows in a graph; None: they are too many, or too many short prompts."""
        return map_step(spread(rows), self.sizes, self._tile_tokens, self._layout)

    def begin(self, step: StepMap, *, adapts: bool = False) -> None:
        """Computes the step's tokens up to the last layer's attention."""
        self._ring.send(step.buffer, self._buffer)
        size = size_for(self.decode_sizes, step.num_sampled) if step.is_decode else step.size
        self._beginnings[_Beginning(size, step.is_decode, adapts)].replay()

    def sample(self, step: StepMap, filters: bool, *, adapts: bool = False) -> None:
        """Samples after the last tokens; each row's token is at its place in the ring's row."""
        num_rows = size_for(self.row_sizes, step.num_sampled)
        self._endings[_Ending(num_rows, filters, adapts)].replay()

    def logits(self, step: StepMap, *, adapts: bool = False) -> PlacedLogits:
        """Logits of this rank's tokens after the last tokens, until the next step's."""
        num_rows = size_for(self.row_sizes, step.num_sampled)
        self._endings[_Ending(num_rows, None, adapts)].replay()
        return PlacedLogits(self.part_of(num_rows), step.places, self.samplers(num_rows))

    def part_of(self, num_rows: int) -> VocabPart:
        """Logits of so many rows, one of the row sizes, as `logits` leaves them."""
        if num_rows not in self._logits:  # only the largest graphs are captured
            self._rehearse_end(num_rows, adapts=False)
        return self._logits[num_rows]

    def samplers(self, num_rows: int) -> Tensor:
        """The slot [num_rows] int32 that each row samples for; -1: none."""
        return self._columns.samplers[:num_rows]

    def _forget(self) -> None:
        """The buffer describes a step without tokens from here on."""
        self._buffer.zero_()
        self._ring.send(self._layout.empty(), self._buffer)

    def _begin(self, layers: LayerStack, size: int, is_decode: bool = False) -> None:
        held, columns, inputs = self._slots, self._columns, self._inputs.first(size)
        held.write_entering(self._entering, MAX_ENTERING, columns.num_entering)
        given = StepColumns(
            columns.counts, columns.num_decodes, columns.slots, columns.starts, columns.firsts
        )
        gather_step_inputs(
            given, held.token_rows, held.block_tables, self._limits.block_size, inputs
        )
        batch = self._decode_batch(size) if is_decode else self._batch(size, inputs)
        if self._model.states is not None:
            batch = with_states(batch, columns, min(size, self._layout.max_sequences))
        firsts = TokenColumns(columns.counts, columns.firsts)
        batch = with_adapters(batch, layers, held, columns.slots, size, firsts)
        carried = layers.begin(inputs.token_ids, inputs.positions, self._kv_cache, batch)
        gather_last(*carried, inputs.last_rows, *self._carried)

    def _batch(self, size: int, inputs: StepInputs) -> AttentionBatch:
        columns, held = self._columns, self._slots
        num_tiles = max_tiles(size, self._tile_tokens[size])
        tiles = Tiles(columns.tile_rows[:num_tiles], columns.tile_firsts[:num_tiles], size)
        batch = AttentionBatch(
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables[:, held.tables.parts[0].columns],
            context_lens=inputs.context_lens,
            cu_seqlens_q=columns.firsts,
            max_seqlen_q=size,
            max_context_len=self._limits.max_model_len,
            mixed=MixedBatch(columns.num_decodes, inputs.decode_lens, tiles),
        )
        if not held.tables.others:
            return batch
        sequences = sequences_of(columns.firsts, inputs.context_lens, size)
        return with_groups(batch, held, columns.slots, inputs.positions, sequences)

    def _decode_batch(self, num_rows: int) -> AttentionBatch:
        """The first sequences, of each its last token."""
        inputs, held = self._inputs, self._slots
        context_lens = inputs.context_lens[:num_rows]
        batch = AttentionBatch.of_decodes(
            inputs.slot_mapping[:num_rows],
            inputs.block_tables[:num_rows, held.tables.parts[0].columns],
            context_lens,
            self._limits.max_model_len,
        )
        if not held.tables.others:
            return batch
        positions = (context_lens.long() - 1).clamp_(min=0)
        return with_groups(batch, held, self._columns.slots[:num_rows], positions)

    def _rehearse_end(self, num_rows: int, adapts: bool) -> None:
        """Everything that graphs of so many rows launch."""
        part = self._model.vocab_part(self._finish(self._layers[adapts], num_rows))
        if not adapts:
            self._logits[num_rows] = part
        for filters in (False, True):
            self._slots.draw(part, self.samplers(num_rows), filters)

    def _end(self, ending: _Ending) -> None:
        layers = self._layers[ending.adapts]
        part = self._model.vocab_part(self._finish(layers, ending.num_rows))
        if ending.filters is None:
            if ending.adapts:  # where other graphs read them
                self._logits[ending.num_rows].logits.copy_(part.logits)
            else:
                self._logits[ending.num_rows] = part
            return
        self._slots.num_steps.add_(1)
        self._slots.draw(part, self.samplers(ending.num_rows), ending.filters)

    def _finish(self, layers: LayerStack, num_rows: int) -> Tensor:
        first, second = (carried[:num_rows] for carried in self._carried)
        batch, samplers = self._decode_batch(num_rows), self.samplers(num_rows)
        batch = with_adapters(batch, layers, self._slots, samplers, num_rows)
        return layers.finish((first, second), self._kv_cache, batch)


def _largest_first(sizes: Sequence[int], largest_only: bool) -> list[int]:
    return sorted(sizes, reverse=True)[: 1 if largest_only else None]
