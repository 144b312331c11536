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
from worker_svc.models.layer_inputs import LayerEnd
from worker_svc.models.layers import Attention
from worker_svc.models.mlp_and_experts import MlpAndExperts
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
    attending: int  # the number of layers before it that have attention
    input_norm: Norm
    mixer: Attention | LatentAttention | RecurrentMixer | None
    post_norm: Norm  # before `feed`, of a layer with both
    # [T, hidden] -> this rank's part of [T, hidden], or of two that read the residual, too, all.
    feed: Callable[[Tensor], Tensor] | MlpAndExperts | None
    output_norms: tuple[Norm | None, Norm | None]  # after the mixer, and after `feed`
    end: LayerEnd | None = None  # of a layer with `feed`


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
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [T, hidden] of a step's tokens -> normed hidden states [T, hidden].

        `states` are those of a model whose sequences have any, `inputs` [T, L, size] those of the
        layers of one that has them.
        """
        hidden = self.layers[0].input_norm(residual)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            of_mixer, _ = layer.output_norms
            if layer.mixer is not None:
                if isinstance(layer.mixer, Attention | LatentAttention):
                    hidden = layer.mixer(hidden, attention, layer.attending)
                else:
                    assert states is not None  # see `Decoder.make_states`
                    hidden = layer.mixer(hidden, states, layer.index)
                then = next_norm if layer.feed is None else layer.post_norm
                hidden, residual = then.add(self._whole(hidden, of_mixer), residual)
            if layer.feed is not None:
                hidden = self._fed(layer, hidden, residual)
                if layer.end is None:
                    hidden, residual = next_norm.add(hidden, residual)
                else:
                    own = None if inputs is None else inputs[:, layer.index]
                    residual = layer.end(residual + hidden, own)
                    hidden = next_norm(residual)
        if states is not None:
            states.finish()
        return hidden

    def _fed(self, layer: LoopLayer, hidden: Tensor, residual: Tensor) -> Tensor:
        """The output of what feeds forward, as it is added to the residual."""
        _, norm = layer.output_norms
        if isinstance(layer.feed, MlpAndExperts):
            fed = layer.feed(hidden, residual)
            return fed if norm is None else norm(fed)
        assert layer.feed is not None
        return self._whole(layer.feed(hidden), norm)

    def _whole(self, part: Tensor, output_norm: Norm | None) -> Tensor:
        """The output of a part of a layer on all ranks, as it is added to the residual."""
        total = self._group.all_reduce(part)
        total = total if self._scale == 1.0 else total * self._scale
        return total if output_norm is None else output_norm(total)
