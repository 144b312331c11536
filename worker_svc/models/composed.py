"""Layers on CUDA that no kernels fuse: parts by torch between kernels of ours, for graphs.

Attention, recurrences, norms, gates and experts are kernels; what is left is torch's, and waits for
nothing. Independent of requests and sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from kernels import reference
from kernels.norm.rms_norm import add_rms_norm, rms_norm
from kernels.norm.silu_and_mul import silu_and_mul
from worker_svc.attention.backend import AttentionChoice, LayerChoices
from worker_svc.attention.batch import AttentionBatch, LastTokens
from worker_svc.attention.latents import TritonLatents
from worker_svc.attention.storing import KernelStep, StoringAttention
from worker_svc.attention.torch_backend import AttentionParts
from worker_svc.attention.triton import TritonAttention
from worker_svc.models.embedding import Embedding
from worker_svc.models.experts import Experts
from worker_svc.models.fused_experts import FusedExperts
from worker_svc.models.fused_gemms import Hidden
from worker_svc.models.latent import LatentAttention
from worker_svc.models.layer_loop import LayerLoop, LoopLayer
from worker_svc.models.layer_stack import TileHeads
from worker_svc.models.layers import MLP, RMSNorm
from worker_svc.models.linear import Linear
from worker_svc.models.spec import Activation
from worker_svc.models.stored.narrow_gemms import multiply_narrow
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.slots import SlotStates

_ACTS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu_and_mul,
    Activation.GELU_TANH: partial(silu_and_mul, gelu=True),
    Activation.RELU2: reference.relu2,
}


@dataclass(frozen=True, slots=True)
class KernelNorm:
    """An RMS norm, in one kernel with the sum before it."""

    weight: Tensor  # [hidden], of the type of what is normed, or float32
    eps: float

    @classmethod
    def of(cls, norm: RMSNorm) -> "KernelNorm":
        """Returns a norm with the weight of this one."""
        return cls(norm.weight, norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, hidden]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """An MLP whose activation is one kernel."""

    gate_up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.act(self.gate_up(hidden)))


@dataclass(frozen=True, slots=True)
class _Experts:
    """Experts whose rows are normed before."""

    experts: FusedExperts

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.experts(Hidden(hidden, hidden), 0.0, None)


class ComposedStack:
    """All layers and the final norm, as a `LayerStack`.

    A layer has its parts from the loop that it is made of. `begin` does all, and `finish` nothing.
    """

    def __init__(
        self,
        embedding: Embedding,
        loop: LayerLoop,
        attention: AttentionParts,
        states: Callable[[], SlotStates | None],
        *,
        over_latents: bool = False,
    ) -> None:
        """Takes over the weights of experts; `states` are those of the slots, once there are any.

        All layers have the same heads. The norms of `loop` are RMSNorm, its feeds MLP and Experts.
        `over_latents`: the cache holds latents in place of keys and values.
        """
        self._embedding = embedding
        self._loop = loop.of([_by_kernels(layer) for layer in loop.layers], _norm(loop.final_norm))
        self._parts = attention
        self._states = states
        (self._heads,) = set(attention.heads)
        self.triton: TritonAttention | TritonLatents
        if over_latents:
            self.triton = TritonLatents()
        else:
            self.triton = TritonAttention(self._heads, embedding.table)
        by_triton = AttentionChoice(self.triton, self.triton, self.triton)
        # Can be replaced until the first graph is captured.
        self.attention = LayerChoices(dict.fromkeys(attention.kinds, by_triton))
        self._attention = StoringAttention(lambda kind: self.attention.of_kind[kind])

    @property
    def splits(self) -> bool:
        """True: nothing waits."""
        return True

    @property
    def carried_widths(self) -> tuple[int, int]:
        """The widths of hidden states, and of nothing."""
        return self._embedding.table.shape[1], 1

    @property
    def tile_heads(self) -> TileHeads:
        """The heads of all layers' attention."""
        heads = self._heads
        return TileHeads(heads.num_heads, heads.num_kv_heads, heads.head_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Any,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids [T] -> normed hidden states [T, hidden], or with `last` [R, hidden]."""
        attention = KernelStep(self._parts, batch, positions, kv_cache, self._attention)
        slot_states = self._states()
        states = None if slot_states is None else InPlaceStep(slot_states, batch, positions)
        hidden = self._loop.run(self._embedding(token_ids), attention, states)
        return hidden if last is None else hidden.index_select(0, last.rows)

    def begin(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Any, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """All of it: hidden states [T, hidden], and nothing [T, 1]."""
        hidden = self.forward(token_ids, positions, kv_cache, batch)
        return hidden, hidden.new_empty((len(hidden), 1))

    def finish(
        self, carried: tuple[Tensor, Tensor], kv_cache: Any, batch: AttentionBatch
    ) -> Tensor:
        """The hidden states that are carried."""
        return carried[0]

    def rehearsed(self) -> "ComposedStack":
        """This stack: a pass over all layers compiles what any of them launches."""
        return self


def _by_kernels(layer: LoopLayer) -> LoopLayer:
    """The layer with kernels in place of the torch parts that have some."""
    for linear in _linears(layer):
        multiply_narrow(linear)
    of_mixer, of_feed = layer.output_norms
    return replace(
        layer,
        input_norm=_norm(layer.input_norm),
        post_norm=_norm(layer.post_norm),
        feed=_feed(layer),
        output_norms=(
            None if of_mixer is None else _norm(of_mixer),
            None if of_feed is None else _norm(of_feed),
        ),
    )


def _linears(layer: LoopLayer) -> tuple[Linear, ...]:
    """The linear layers that may have weights in few bits, experts apart."""
    mixer, feed = layer.mixer, layer.feed
    of_mixer: tuple[Linear, ...] = ()
    if mixer is not None and not isinstance(mixer, LatentAttention):  # that has plain ones
        of_mixer = mixer.linears
    return *of_mixer, *(feed.linears if isinstance(feed, MLP) else ())


def _norm(norm: object) -> KernelNorm:
    assert isinstance(norm, RMSNorm)
    return KernelNorm.of(norm)


def _feed(layer: LoopLayer) -> Callable[[Tensor], Tensor] | None:
    if isinstance(layer.feed, Experts):
        assert isinstance(layer.post_norm, RMSNorm)
        return _Experts(FusedExperts.of(layer.post_norm, layer.feed))
    if isinstance(layer.feed, MLP):
        return _Mlp(*layer.feed.linears, _ACTS[layer.feed.activation])
    assert layer.feed is None
    return None
