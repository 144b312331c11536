"""One layer's attention in one step, as every implementation takes it."""

from dataclasses import dataclass

from torch import Tensor

from kernels.attention_kind import AttentionKind
from kernels.reference import LatentWeights
from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.layer_kv import LayerKv


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """The projections of T tokens' hidden states that attention over latents reads."""

    q: Tensor  # [T, H, N + P], of which the last P dimensions are to be rotated
    kv: Tensor  # [T, R + P]: a latent to be normed, and a key to be rotated
    norm: Tensor  # [R]
    eps: float  # of the norm
    weights: LatentWeights
    is_interleaved: bool  # pairs that turn are next to each other


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Queries of T tokens over the cache of a layer; a sequence's last query sees its last key.

    A captured graph repeats it with other values of lengths and tables.
    """

    q: Tensor  # [T, H, D], normed and rotated
    kv: LayerKv
    batch: AttentionBatch  # that of the layer's KV group
    kind: AttentionKind
    # [T, Hkv, D] and [T, Hkv, Dv], to be stored before; None: the cache has them already. Keys that
    # hold their values come alone.
    k: Tensor | None = None
    v: Tensor | None = None
    sinks: Tensor | None = None  # [H], where the kind has them
    out: Tensor | None = None  # where the result goes; None: into a new tensor

    def result(self) -> Tensor:
        """A tensor [T, H, Dv] for what it attends to."""
        return self.q.new_empty((*self.q.shape[:2], self.kv.v.shape[3]))

    def part(self, first: int, end: int, batch: AttentionBatch, out: Tensor) -> "AttentionCall":
        """The attention of consecutive tokens alone, whose keys are in the cache."""
        return AttentionCall(
            self.q[first:end], self.kv, batch, self.kind, sinks=self.sinks, out=out[first:end]
        )
