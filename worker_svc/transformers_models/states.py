"""Recurrent and convolution states of a model's layers, one row per slot.

A forward pass reads the rows of its sequences and writes new ones to another place: a failed step
leaves the states as they were.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from worker_svc.device.transfer import upload
from worker_svc.protocol.step import IntColumn

_ALIGNMENT = 16  # bytes at which a state begins in its row
CONV, RECURRENT = "conv", "recurrent"


@dataclass(frozen=True, slots=True)
class StateKey:
    """One state of one layer."""

    layer: int
    kind: str  # CONV or RECURRENT
    index: int  # among the layer's states of this kind


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StateProbe(Cache):
    """Notes the shapes of all states in one pass over a sequence without a past."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[StateKey, StateShape] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is no past."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is no past."""
        return None

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Notes the state's shape [C, width] -> the inputs [B, C, N] with zeros before them."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(StateKey(layer_idx, CONV, state_idx), conv_states[0, :, :1].expand(-1, width))
        return torch.nn.functional.pad(conv_states, (width, 0))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Notes the state's shape."""
        self._note(StateKey(layer_idx, RECURRENT, state_idx), recurrent_states[0])
        return recurrent_states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone: the past is in the paged cache."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given."""
        return 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """False: there is no past."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: a state is rolled back as a whole."""
        return False

    def _note(self, key: StateKey, row: Tensor) -> None:
        self.shapes[key] = StateShape(tuple(row.shape), row.dtype)


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
        begin = 0
        for key, shape in shapes.items():
            part = memory[:, begin : begin + shape.num_bytes].view(shape.dtype)
            self._rows[key] = part.view(num_rows, *shape.shape)
            begin += _aligned(shape.num_bytes)
        self._place = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        self._place_once_worked = np.zeros(self._num_rows, dtype=np.int64)
        # The row that a slot reads in place of its own; 0, which is none's to share: its own.
        self._instead = torch.zeros(self._num_rows, dtype=torch.int64, device=device)

    def read(self, slots: Tensor, is_first: Tensor) -> dict[StateKey, Tensor]:
        """Copies of the states of slots [B], of padding below 0; zeros where `is_first` [B]."""
        slots = self._known(slots)
        at, instead = self._at(slots), self._instead[slots]
        at = torch.where(instead > 0, instead, at)
        found = {}
        for key, rows in self._rows.items():
            states = rows.index_select(0, at)
            found[key] = states.masked_fill_(is_first.view(-1, *[1] * (states.dim() - 1)), 0)
        return found

    def write(self, slots: Tensor, states: dict[StateKey, Tensor]) -> None:
        """Writes the new states of slots [B] to their other place, which counts from now on."""
        slots = self._known(slots)
        place = 1 - self._place[slots]
        at = slots + place * self._num_rows
        for key, values in states.items():
            self._rows[key].index_copy_(0, at, values)
        self._place.index_copy_(0, slots, place)
        self._instead.index_fill_(0, slots, 0)

    def keep(self, snapshot: int, states: dict[StateKey, Tensor]) -> None:
        """Makes a snapshot of the states [1, ...] of a sequence in the middle of a pass."""
        for key, values in states.items():
            self._rows[key][self._first_snapshot + snapshot] = values[0]

    def restore(self, snapshots: Mapping[int, int]) -> None:
        """See `StatesBySlot`."""
        slots, rows = self._of(snapshots)
        self._instead.index_copy_(0, slots, rows)

    def save(self, snapshots: Mapping[int, int]) -> None:
        """See `StatesBySlot`."""
        slots, rows = self._of(snapshots)
        self._words.index_copy_(0, rows, self._words.index_select(0, self._at(slots)))

    def commit(self, slots: IntColumn) -> None:
        """The step worked, and wrote the states of these slots."""
        self._place_once_worked[slots] ^= 1

    def rollback(self) -> None:
        """The step failed: the states are as before it."""
        self._place.copy_(torch.from_numpy(self._place_once_worked))
        self._instead.zero_()

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


class PassStates(StateProbe):
    """The states of the sequences of one forward pass, [B, ...] each."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        super().__init__()
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs [B, C, width] of a convolution; a class may overwrite them in place."""
        return self.states[StateKey(layer_idx, CONV, state_idx)]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent state [B, ...]; a class may overwrite it in place."""
        return self.states.get(StateKey(layer_idx, RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Inputs [B, C, N] -> the earlier ones and these, [B, C, width + N]."""
        key = StateKey(layer_idx, CONV, state_idx)
        before = self.states[key]
        both = torch.cat((before, conv_states), dim=-1)
        self.states[key] = both[..., -before.shape[-1] :].contiguous()
        return both

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Takes the state after the last token."""
        self.states[StateKey(layer_idx, RECURRENT, state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True: where a sequence begins, the past is zeros."""
        return True
