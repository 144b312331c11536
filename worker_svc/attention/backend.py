"""Attention backends on CUDA: their common interface, and those of each kind of layer and of step.

Knows no implementation; `tuning.attention` chooses one, `models/fused.py` calls it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.attention_kind import AttentionKind
from worker_svc.attention.batch import MixedBatch
from worker_svc.attention.call import AttentionCall

KINDS = ("decode", "prefill")


class Backend(Protocol):
    """Causal attention over the paged cache, which has all keys and values already.

    Returns [T, H, Dv], written to the call's `out` if it has one. It must not depend on the values
    of lengths and tables when it is called: a captured graph repeats it with others.
    """

    @property
    def name(self) -> str:
        """The backend's name in reports."""

    def serves(self, kind: AttentionKind) -> bool:
        """True if it attends as layers of this kind do; else the next backend is asked."""

    def decode(self, call: AttentionCall) -> Tensor:
        """Attention of one query per sequence; ignores `cu_seqlens_q`."""

    def prefill(self, call: AttentionCall) -> Tensor:
        """Attention of any number of queries per sequence."""


class GraphBackend(Backend, Protocol):
    """A backend that serves a mixed step in a graph, too."""

    def mixed(self, call: AttentionCall, mixed: MixedBatch) -> Tensor:
        """Decodes and prompts of a step whose shape the device knows; of padding anything."""


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
    mixed: GraphBackend
    timings: tuple[AttentionTiming, ...] = ()

    @property
    def name(self) -> str:
        """One name, or one for each kind."""
        if self.decode.name == self.prefill.name:
            return self.decode.name
        return f"decode: {self.decode.name}, prefill: {self.prefill.name}"

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of any step [T, H, Dv], by the backends of its parts."""
        batch = call.batch
        if batch.mixed is not None:
            return self.mixed.mixed(call, batch.mixed)
        if batch.parts is None:
            attend = self.decode.decode if batch.is_decode else self.prefill.prefill
            return attend(call)
        out = call.result()
        decodes, prompts = batch.parts
        n = len(decodes.context_lens)
        self.decode.decode(call.part(0, n, decodes, out))
        self.prefill.prefill(call.part(n, len(out), prompts, out))
        return out


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """The choice for each kind of a model's layers."""

    of_kind: Mapping[AttentionKind, AttentionChoice]

    @property
    def name(self) -> str:
        """One name, or one for each kind of layer."""
        names = {str(kind): choice.name for kind, choice in self.of_kind.items()}
        if len(set(names.values())) == 1:
            return next(iter(names.values()))
        return "; ".join(f"{kind}: {name}" for kind, name in names.items())

    @property
    def timings(self) -> tuple[AttentionTiming, ...]:
        """All measurements."""
        return tuple(timing for choice in self.of_kind.values() for timing in choice.timings)
