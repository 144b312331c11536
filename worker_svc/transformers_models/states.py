"""States of the layers of a class of transformers, as the class asks for them in one pass."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from worker_svc.states.slots import StateKey, StateShape

CONV, RECURRENT = "conv", "recurrent"


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
