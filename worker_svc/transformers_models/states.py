"""Recurrent and convolution states of a model's layers, one row per slot.

A forward pass reads the rows of its sequences and writes new ones to another place: a failed step
leaves the states as they were.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from worker_svc.protocol.step import IntColumn

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
    Only the compute thread changes them.
    """

    def __init__(
        self, shapes: dict[StateKey, StateShape], max_num_seqs: int, device: torch.device
    ) -> None:
        self._num_rows = max_num_seqs + 1  # the last one is that of padding
        self._rows = {
            key: torch.zeros((2 * self._num_rows, *shape.shape), dtype=shape.dtype, device=device)
            for key, shape in shapes.items()
        }
        self._place = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        self._place_once_worked = np.zeros(self._num_rows, dtype=np.int64)

    def read(self, slots: Tensor, is_first: Tensor) -> dict[StateKey, Tensor]:
        """Copies of the states of slots [B], of padding below 0; zeros where `is_first` [B]."""
        slots = self._known(slots)
        at = slots + self._place[slots] * self._num_rows
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

    def commit(self, slots: IntColumn) -> None:
        """The step worked, and wrote the states of these slots."""
        self._place_once_worked[slots] ^= 1

    def rollback(self) -> None:
        """The step failed: the states are as before it."""
        self._place.copy_(torch.from_numpy(self._place_once_worked))

    def _known(self, slots: Tensor) -> Tensor:
        slots = slots.long()
        return torch.where(slots < 0, self._num_rows - 1, slots)


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
