"""Layers one after the other, each part with a norm before it and a residual around it.

It knows neither how parts compute nor where keys, values and states lie.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.attention.torch_backend import AttentionStep
from worker_svc.models.latent import LatentAttention
from worker_svc.models.layers import Attention
from worker_svc.models.recurrent import RecurrentMixer
from worker_svc.parallel.group import Group
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.step import StateStep


class Norm(Protocol):
    """A norm over the hidden dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, hidden]."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""


@dataclass(frozen=True, slots=True)
class LoopLayer:
    """The parts of one layer: a mixer of tokens, what feeds each token forward, or both."""

    index: int  # among all layers
    stored: int  # the number of layers before it that have keys and values
    input_norm: Norm
    mixer: Attention | LatentAttention | RecurrentMixer | None
    post_norm: Norm  # before `feed`, of a layer with both
    feed: Callable[[Tensor], Tensor] | None  # [T, hidden] -> this rank's part of [T, hidden]
    output_norms: tuple[Norm | None, Norm | None]  # after the mixer, and after `feed`

    @property
    def keeps_states(self) -> bool:
        """True if its mixer has states of sequences in place of keys and values."""
        return self.mixer is not None and not isinstance(self.mixer, Attention | LatentAttention)


class LayerLoop:
    """All layers and the final norm."""

    def __init__(
        self, layers: Sequence[LoopLayer], final_norm: Norm, scale: float, group: Group
    ) -> None:
        """`scale` is the factor on what a part returns, `group` are the ranks that divide it."""
        self.layers = layers
        self.final_norm = final_norm
        self._scale = scale
        self._group = group

    def of(self, layers: Sequence[LoopLayer], final_norm: Norm) -> "LayerLoop":
        """The loop with other layers and another final norm."""
        other = copy.copy(self)
        other.layers, other.final_norm = layers, final_norm
        return other

    def run(
        self,
        residual: Tensor,
        attention: AttentionStep,
        states: StateStep | InPlaceStep | None,
    ) -> Tensor:
        """Embeddings [T, hidden] of a step's tokens -> normed hidden states [T, hidden].

        `states` are those of a model whose sequences have any.
        """
        hidden = self.layers[0].input_norm(residual)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            of_mixer, of_feed = layer.output_norms
            if layer.mixer is not None:
                if isinstance(layer.mixer, Attention | LatentAttention):
                    hidden = layer.mixer(hidden, attention, layer.stored)
                else:
                    assert states is not None  # see `Decoder.make_states`
                    hidden = layer.mixer(hidden, states, layer.index)
                then = next_norm if layer.feed is None else layer.post_norm
                hidden, residual = then.add(self._whole(hidden, of_mixer), residual)
            if layer.feed is not None:
                hidden, residual = next_norm.add(self._whole(layer.feed(hidden), of_feed), residual)
        if states is not None:
            states.finish()
        return hidden

    def _whole(self, part: Tensor, output_norm: Norm | None) -> Tensor:
        """The output of a part of a layer on all ranks, as it is added to the residual."""
        total = self._group.all_reduce(part)
        total = total if self._scale == 1.0 else total * self._scale
        return total if output_norm is None else output_norm(total)
