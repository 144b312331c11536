"""Layers that keep states of sequences in place of keys and values, by their specs."""

from typing import Protocol

import torch
from torch import Tensor

from worker_svc.models.delta_net import DeltaNet
from worker_svc.models.layers import Destinations
from worker_svc.models.linear import Linear
from worker_svc.models.mamba2 import Mamba2
from worker_svc.models.short_conv import ShortConv
from worker_svc.models.spec import DeltaNetSpec, Mamba2Spec, ModelSpec, RecurrentSpec, ShortConvSpec
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.step import StateStep


class RecurrentMixer(Protocol):
    """A layer's mixer of tokens; it has the states that its spec names."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers."""

    def destinations(self, prefix: str) -> Destinations:
        """The checkpoint's names of its weights, and what they fill."""

    def drop_output_bias(self) -> None:
        """Drops the bias; called on all ranks but one, since the ranks' outputs are summed."""

    def add_norm_offset(self) -> None:
        """Adds the offset of norms, once, when all weights are filled."""

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""

    def __call__(self, hidden: Tensor, step: StateStep | InPlaceStep, layer: int) -> Tensor:
        """Hidden states [T, hidden] -> this rank's part of the outputs [T, hidden]."""


def mixer_of(
    spec: RecurrentSpec, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> RecurrentMixer:
    """The layer of a spec, with weights to be filled."""
    match spec:
        case DeltaNetSpec():
            return DeltaNet(model.hidden_size, spec, model.rms_norm_eps, dtype, device)
        case ShortConvSpec():
            return ShortConv(model.hidden_size, spec, dtype, device)
        case Mamba2Spec():
            return Mamba2(model.hidden_size, spec, dtype, device)
