"""One step's reading and writing of states, layer by layer, for layers of ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.attention.batch import AttentionBatch
from worker_svc.protocol.step import IntColumn
from worker_svc.states.slots import SlotStates
from worker_svc.states.spans import StateSpan, spans

States = Mapping[str, Tensor]  # of a layer, by the layer's names, [B, ...] each

# (inputs [B, N, ...] each of N tokens of B sequences, their states before) -> (outputs [B, N, ...],
# the states after). It may overwrite what it is given.
Update = Callable[[tuple[Tensor, ...], States], tuple[Tensor, States]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A span of the step on the device."""

    tokens: Tensor | None  # [B N] of the step's T; None: all, in order
    num_sequences: int  # B
    before: Tensor | None  # [B] rows to be read; None: its states are those after the last part
    after: Tensor | None  # [B] rows to be written; None: none
    is_first: Tensor  # [B] True for sequences without a past
    snapshot: int | None

    def of(self, values: Tensor) -> Tensor:
        """Its part [B, N, ...] of a value [T, ...] for each token."""
        own = values if self.tokens is None else values.index_select(0, self.tokens)
        return own.view(self.num_sequences, -1, *values.shape[1:])


class StateStep:
    """The states of a step's sequences. Call `finish` when all layers have written theirs.

    With drafts the new states count once these are verified: a sequence with refused ones is
    updated once more, from its states before the step and over the tokens that are left.
    """

    def __init__(self, states: SlotStates, batch: AttentionBatch, positions: Tensor) -> None:
        """`positions` [T]: a sequence begins at 0, where all states are zeros."""
        self._states = states
        self._slots = batch.slots  # None: a rehearsal, which writes nothing
        # What layers were given, in a step with drafts.
        self._given: list[tuple[int, Update, tuple[Tensor, ...]]] | None = None
        if batch.has_drafts:
            self._given, self._firsts = [], batch.cu_seqlens_q.tolist()
        self._parts: list[_Part] = []
        goes_on = False
        for span in spans(batch):
            self._parts.append(self._part(span, batch, positions, goes_on=goes_on))
            goes_on = span.is_cut

    def _part(
        self, span: StateSpan, batch: AttentionBatch, positions: Tensor, *, goes_on: bool
    ) -> _Part:
        device, num_sequences = positions.device, len(span.sequences)
        tokens, slots = None, batch.slots
        if len(span.tokens) < len(positions):
            tokens = torch.tensor(span.tokens, device=device)
            if slots is not None:
                slots = slots[torch.tensor(span.sequences, device=device)]
        first = positions if tokens is None else positions[tokens]
        writes = slots is not None and not span.is_cut
        if slots is None:
            slots = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        return _Part(
            tokens,
            num_sequences,
            None if goes_on else self._states.rows_before(slots),
            self._states.rows_after(slots) if writes else None,
            first.view(num_sequences, -1)[:, 0] == 0,
            span.snapshot,
        )

    def run(self, layer: int, update: Update, inputs: tuple[Tensor, ...]) -> Tensor:
        """Calls `update` with inputs [T, ...] of a layer, part by part -> outputs [T, ...]."""
        keys = self._states.of_layer(layer)
        if self._given is not None:
            self._given.append((layer, update, tuple(each.clone() for each in inputs)))
        out: Tensor | None = None
        after: States = {}
        for part in self._parts:
            before = after
            if part.before is not None:
                rows, is_first = part.before, part.is_first
                before = {name: self._states.get(key, rows, is_first) for name, key in keys.items()}
            result, after = update(tuple(map(part.of, inputs)), before)
            for name, key in keys.items():
                if part.after is not None:
                    self._states.put(key, part.after, after[name])
                elif part.snapshot is not None and self._slots is not None:
                    self._states.keep(part.snapshot, {key: after[name]})
            result = result.flatten(0, 1)
            if part.tokens is None:
                return result
            if out is None:
                out = result.new_empty((len(inputs[0]), *result.shape[1:]))
            out.index_copy_(0, part.tokens, result)
        assert out is not None  # a step has tokens
        return out

    def finish(self) -> None:
        """Makes what was written count, or has that wait for `SlotStates.settle`."""
        if self._slots is None:
            return
        if self._given is None:
            self._states.turn(self._slots)
        else:
            self._states.turn_once_settled(self._slots, self._update_again)

    def _update_again(self, num_refused: IntColumn) -> None:
        """Updates sequences with refused drafts without these."""
        assert self._given is not None and self._slots is not None
        for sequence in np.flatnonzero(num_refused).tolist():
            begin, end = self._firsts[sequence : sequence + 2]
            tokens = slice(begin, end - int(num_refused[sequence]))
            slot = self._slots[sequence : sequence + 1]
            before, after = self._states.rows_before(slot), self._states.rows_after(slot)
            has_past = torch.zeros_like(slot, dtype=torch.bool)  # as all have that decode
            for layer, update, inputs in self._given:
                keys = self._states.of_layer(layer)
                states = {n: self._states.get(key, before, has_past) for n, key in keys.items()}
                _, found = update(tuple(each[None, tokens] for each in inputs), states)
                for name, key in keys.items():
                    self._states.put(key, after, found[name])
