"""Recurrent and convolution states of a model's layers, one row per slot.

A step reads the rows of its sequences and writes new ones to another place: a failed step leaves
the states as they were.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from worker_svc.device.transfer import upload
from worker_svc.protocol.step import IntColumn

_ALIGNMENT = 16  # bytes at which a state begins in its row


@dataclass(frozen=True, slots=True)
class StateKey:
    """One state of one layer."""

    layer: int
    kind: str  # the layer's name of it
    index: int = 0  # among the layer's states of this kind


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the state."""
        return prod(self.shape) * self.dtype.itemsize


class SlotStates:
    """All states of all slots, each in two places: a step reads one and writes the other.

    Which one counts is a number on the device, so that graphs can record both. The host knows it,
    too, as of the last step that worked, and a step that fails is undone by sending that again.
    After the slots' rows come those of snapshots; a slot that begins after one reads that in its
    first step. Only the compute thread changes them.
    """

    def __init__(
        self,
        shapes: Mapping[StateKey, StateShape],
        max_num_seqs: int,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        self._num_rows = max_num_seqs + 1  # the last one is that of padding
        self._first_snapshot = 2 * self._num_rows - 1  # snapshots are numbered from 1
        num_rows = 2 * self._num_rows + num_snapshots
        # One row of bytes holds all states of a sequence, so that one copy makes a snapshot.
        memory = torch.zeros((num_rows, row_bytes(shapes)), dtype=torch.uint8, device=device)
        self._words = memory.view(torch.int64)
        self._rows: dict[StateKey, Tensor] = {}
        self._of_layer: dict[int, dict[str, StateKey]] = {}
        self._rows_of_layer: dict[int, dict[str, Tensor]] = {}
        begin = 0
        for key, shape in shapes.items():
            self._of_layer.setdefault(key.layer, {})[key.kind] = key
            part = memory[:, begin : begin + shape.num_bytes].view(shape.dtype)
            self._rows[key] = part.view(num_rows, *shape.shape)
            self._rows_of_layer.setdefault(key.layer, {})[key.kind] = self._rows[key]
            begin += _aligned(shape.num_bytes)
        self._place = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        self._place_once_worked = np.zeros(self._num_rows, dtype=np.int64)
        # Slots [B] of a step with drafts, until these are verified, and what updates them again.
        self._unsettled: tuple[Tensor, Callable[[IntColumn], None]] | None = None
        # The row that a slot reads in place of its own; 0, which is none's to share: its own.
        self._instead = torch.zeros(self._num_rows, dtype=torch.int64, device=device)

    def read(self, slots: Tensor, is_first: Tensor) -> dict[StateKey, Tensor]:
        """Copies of the states of slots [B], of padding below 0; zeros where `is_first` [B]."""
        rows = self.rows_before(slots)
        return {key: self.get(key, rows, is_first) for key in self._rows}

    def write(self, slots: Tensor, states: Mapping[StateKey, Tensor]) -> None:
        """Writes the new states of slots [B] to their other place, which counts from now on."""
        rows = self.rows_after(slots)
        for key, values in states.items():
            self.put(key, rows, values)
        self.turn(slots)

    def of_layer(self, layer: int) -> Mapping[str, StateKey]:
        """The states of a layer that has one of each kind, by kind."""
        return self._of_layer[layer]

    def rows_of(self, layer: int) -> Mapping[str, Tensor]:
        """The rows [R, ...] of all slots and snapshots of each state of a layer, by its kind."""
        return self._rows_of_layer[layer]

    def snapshot_row(self, snapshot: int) -> int:
        """The row of a snapshot."""
        return self._first_snapshot + snapshot

    def rows_before(self, slots: Tensor) -> Tensor:
        """The rows [B] where the states of slots [B] are; a slot below 0 is padding."""
        slots = self._known(slots)
        instead = self._instead[slots]
        return torch.where(instead > 0, instead, self._at(slots))

    def rows_after(self, slots: Tensor) -> Tensor:
        """The rows [B] where the new states of slots [B] go, until `turn`."""
        slots = self._known(slots)
        return slots + (1 - self._place[slots]) * self._num_rows

    def get(self, key: StateKey, rows: Tensor, is_first: Tensor) -> Tensor:
        """A copy of a state in rows [B]; zeros where `is_first` [B]."""
        states = self._rows[key].index_select(0, rows)
        return states.masked_fill_(is_first.view(-1, *[1] * (states.dim() - 1)), 0)

    def put(self, key: StateKey, rows: Tensor, values: Tensor) -> None:
        """Writes a state [B, ...] to rows [B]."""
        self._rows[key].index_copy_(0, rows, values)

    def turn(self, slots: Tensor) -> None:
        """The other place of slots [B] counts from now on: all their states are written."""
        slots = self._known(slots)
        self._place.index_copy_(0, slots, 1 - self._place[slots])
        self._instead.index_fill_(0, slots, 0)

    def keep(self, snapshot: int, states: Mapping[StateKey, Tensor]) -> None:
        """Makes a snapshot of the states [1, ...] of a sequence in the middle of a pass."""
        for key, values in states.items():
            self._rows[key][self.snapshot_row(snapshot)] = values[0]

    def restore(self, snapshots: Mapping[int, int]) -> None:
        """See `StatesBySlot`."""
        slots, rows = self._of(snapshots)
        self._instead.index_copy_(0, slots, rows)

    def save(self, snapshots: Mapping[int, int]) -> None:
        """See `StatesBySlot`."""
        slots, rows = self._of(snapshots)
        self._words.index_copy_(0, rows, self._words.index_select(0, self._at(slots)))

    def turn_once_settled(self, slots: Tensor, update: Callable[[IntColumn], None]) -> None:
        """Has the new states of slots [B] count once the step's drafts are verified.

        `update` is called before, with the number of refused ones [B], and writes the states again.
        """
        self._unsettled = slots, update

    def settle(self, num_refused: IntColumn) -> None:
        """See `StatesBySlot`."""
        assert self._unsettled is not None, "the step had no drafts"
        (slots, update), self._unsettled = self._unsettled, None
        update(num_refused)
        self.turn(slots)

    def commit(self, slots: IntColumn) -> None:
        """The step worked, and wrote the states of these slots."""
        self._place_once_worked[slots] ^= 1

    def rollback(self) -> None:
        """The step failed: the states are as before it."""
        self._place.copy_(torch.from_numpy(self._place_once_worked))
        self._instead.zero_()
        self._unsettled = None

    def _of(self, snapshots: Mapping[int, int]) -> tuple[Tensor, Tensor]:
        """The slots and the rows of their snapshots, on the device."""
        slots, rows = upload(
            self._place.device,
            np.array(list(snapshots), dtype=np.int64),
            np.array(list(snapshots.values()), dtype=np.int64) + self._first_snapshot,
        )
        return slots, rows

    def _at(self, slots: Tensor) -> Tensor:
        """The rows that count, of slots [B]."""
        return slots + self._place[slots] * self._num_rows

    def _known(self, slots: Tensor) -> Tensor:
        slots = slots.long()
        return torch.where(slots < 0, self._num_rows - 1, slots)


def row_bytes(shapes: Mapping[StateKey, StateShape]) -> int:
    """Bytes of all states of one sequence."""
    return sum(_aligned(shape.num_bytes) for shape in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
