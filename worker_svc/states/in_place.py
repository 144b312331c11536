"""One step's states for kernels that read and write them where they lie, without copies.

Nothing here waits for the device, so that graphs can record a step whose sequences have one token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.recurrent.segments import Bounds, Segments
from worker_svc.attention.batch import AttentionBatch, StateCut
from worker_svc.device.transfer import upload
from worker_svc.protocol.step import IntColumn
from worker_svc.states.slots import SlotStates

# Reads and writes states as the segments of each wave say -> outputs [T, ...].
InPlaceUpdate = Callable[[Sequence[Segments]], Tensor]


class InPlaceStep:
    """The states of a step's sequences. Call `finish` when all layers have written theirs.

    With drafts the new states count once these are verified: see `StateStep`.
    """

    def __init__(self, states: SlotStates, batch: AttentionBatch, positions: Tensor) -> None:
        """`positions` [T]: a sequence begins at 0, where all states are zeros."""
        self._states = states
        self._slots = batch.slots  # None: a rehearsal, which writes rows of padding
        self._batch = batch
        self._num_tokens = len(positions)
        self._updates: list[InPlaceUpdate] | None = [] if batch.has_drafts else None
        # All sequences, each up to its first cut; then those that were cut, up to the next one.
        self.waves: Sequence[Segments]
        if batch.is_decode:
            self.waves = (self._segments(positions == 0),)
        else:
            self.waves = tuple(self._of_prompts(batch, positions))

    def rows(self, layer: int) -> Mapping[str, Tensor]:
        """The memory [R, ...] of each state of a layer, by its kind: all slots and snapshots."""
        return self._states.rows_of(layer)

    def run(self, update: InPlaceUpdate) -> Tensor:
        """The outputs [T, ...] of a layer's update of its states."""
        if self._updates is not None:
            self._updates.append(update)
        return update(self.waves)

    def finish(self) -> None:
        """Makes what was written count, or has that wait for `SlotStates.settle`."""
        if self._slots is None:
            return
        if self._updates is None:
            self._states.turn(self._slots)
        else:
            self._states.turn_once_settled(self._slots, self._update_again)

    def _update_again(self, num_refused: IntColumn) -> None:
        """Updates sequences with refused drafts without these."""
        assert self._updates is not None and self._slots is not None
        refusing = np.flatnonzero(num_refused)
        if not len(refusing):
            return
        which, refused = upload(self._slots.device, refusing, num_refused[refusing])
        starts, slots = self._batch.cu_seqlens_q, self._slots[which]
        begin, end = starts[which], starts[which + 1] - refused
        again = Segments(
            self._states.rows_before(slots),
            self._states.rows_after(slots),
            torch.zeros_like(which, dtype=torch.bool),  # what decodes has a past
            Bounds.of(begin.int(), end.int(), self._num_tokens),
        )
        for update in self._updates:
            update((again,))

    def _segments(self, is_first: Tensor) -> Segments:
        """A token of each sequence."""
        slots = self._slots
        if slots is None:
            slots = torch.full_like(is_first, -1, dtype=torch.int64)
        return Segments(self._states.rows_before(slots), self._states.rows_after(slots), is_first)

    def _of_prompts(self, batch: AttentionBatch, positions: Tensor) -> Iterator[Segments]:
        begin, end = batch.cu_seqlens_q[:-1], batch.cu_seqlens_q[1:].clone()  # see `Segments`
        num_tokens = len(positions)
        whole = self._segments(positions[begin.clamp(max=num_tokens - 1).long()] == 0)
        if self._slots is None or not batch.state_cuts:
            yield replace(whole, bounds=Bounds.of(begin, end, num_tokens))
            return
        cuts = _by_sequence(batch.state_cuts)
        for wave in range(1 + max(map(len, cuts.values()))):
            # Of sequences that have such a part: where it ends and what is written there ...
            parts = {i: of[wave] for i, of in cuts.items() if wave < len(of)}
            ends, rows = end.clone(), whole.after.clone()
            which, num_before, snapshots = self._uploaded(parts, end.device)
            ends[which] = (begin[which] + num_before).int()
            rows[which] = snapshots
            part = replace(whole, after=rows, bounds=Bounds.of(begin, ends, num_tokens))
            if not wave:
                yield part
                continue
            # ... and where it begins, after the last one.
            last = {i: of[wave - 1] for i, of in cuts.items() if wave <= len(of)}
            which, num_before, snapshots = self._uploaded(last, end.device)
            begins = (begin[which] + num_before).int()
            yield Segments(
                snapshots.clone(),  # one of several in one upload
                rows[which],
                torch.zeros_like(which, dtype=torch.bool),
                Bounds.of(begins, ends[which], num_tokens),
            )

    def _uploaded(self, cuts: Mapping[int, StateCut], device: torch.device) -> Sequence[Tensor]:
        """Sequences that are cut, the tokens of each before its cut, and rows of snapshots."""
        numbers = [
            (i, cut.num_tokens, self._states.snapshot_row(cut.snapshot)) for i, cut in cuts.items()
        ]
        return upload(device, *np.array(numbers, dtype=np.int64).reshape(-1, 3).T)


def _by_sequence(cuts: Sequence[StateCut]) -> Mapping[int, list[StateCut]]:
    """The cuts of each sequence that has any, in order."""
    found: dict[int, list[StateCut]] = {}
    for cut in cuts:
        found.setdefault(cut.sequence, []).append(cut)
    return found
