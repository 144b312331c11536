"""Who attends on CUDA: what every implementation offers, and which one serves which kind of step.

Knows no implementation; `attention_choice` decides, `models/fused.py` calls.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.attention import AttentionBatch

KINDS = ("decode", "prefill")


class Backend(Protocol):
    """Causal attention over the paged cache; the last query of a sequence sees its last key.

    q [T, H, D], k_cache and v_cache [num_blocks, block_size, Hkv, D] -> [T, H, D], written into
    `out` where one is given. Nothing that a call does may depend on what lengths and tables hold
    when it is made: a captured graph repeats it with others.
    """

    @property
    def name(self) -> str:
        """What reports call it."""

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
    ) -> Tensor:
        """One query for each sequence; does not look at `cu_seqlens_q`."""

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
    ) -> Tensor:
        """Any number of queries for each sequence."""


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """What one backend took for one shape."""

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
