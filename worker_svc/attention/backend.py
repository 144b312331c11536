"""Attention backends on CUDA: their common interface, and the backend of each kind of step.

Knows no implementation; `attention_choice` chooses one, `models/fused.py` calls it.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.attention.batch import AttentionBatch

KINDS = ("decode", "prefill")


class Backend(Protocol):
    """Causal attention over the paged cache; the last query of a sequence sees its last key.

    q [T, H, D], k_cache and v_cache [num_blocks, block_size, Hkv, D] -> [T, H, D], written to `out`
    if given. A cache in FP8 comes with its scales [4, Hkv] (`kernels.fp8`). A call must not depend
    on the values of lengths and tables when it is made: a captured graph repeats it with others.
    """

    @property
    def name(self) -> str:
        """The backend's name in reports."""

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query per sequence; ignores `cu_seqlens_q`."""

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Attention of any number of queries per sequence."""


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """Measured time of one backend for one shape."""

    kind: str  # one of KINDS
    shape: str  # in words
    backend: str
    us: float


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend of each kind of step, and the measurements of the choice, if there were any."""

    decode: Backend
    prefill: Backend
    timings: tuple[AttentionTiming, ...] = ()

    @property
    def name(self) -> str:
        """One name, or one for each kind."""
        if self.decode.name == self.prefill.name:
            return self.decode.name
        return f"decode: {self.decode.name}, prefill: {self.prefill.name}"
