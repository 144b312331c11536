"""The interface of a loaded model: everything that a runner and start-up know of it.

`Decoder` is the implementation with layers of ours; another may bring layers of its own.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from worker_svc.attention.batch import AttentionBatch, LastTokens
from worker_svc.attention.kv_cache import PagedCache
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.models.layer_stack import LayerStack
from worker_svc.parallel.group import Group
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import IntColumn
from worker_svc.quantization.scheme import Quantization

if TYPE_CHECKING:
    from worker_svc.models.adapted_stack import AdaptedStack
    from worker_svc.models.fused import FusedDecoder


class ModelShape(Protocol):
    """The facts of a configuration that schedulers are told."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def quantization(self) -> Quantization | None: ...


class StatesBySlot(Protocol):
    """States of sequences that lie in slots; a step writes them when it has worked."""

    def restore(self, snapshots: Mapping[int, int]) -> None:
        """The next step of these slots reads a snapshot, by slot, in place of their states."""

    def save(self, snapshots: Mapping[int, int]) -> None:
        """Copies the states of these slots, as the step has written them, into snapshots."""

    def settle(self, num_refused: IntColumn) -> None:
        """Takes the states of a step with drafts back over those refused [B], by sequence."""

    def commit(self, slots: IntColumn) -> None:
        """The step worked, and wrote the states of these slots."""

    def rollback(self) -> None:
        """The step failed: the states are as before it."""


class StepModel(Protocol):
    """A model, or one rank's shard of it, ready to compute steps."""

    dtype: torch.dtype  # of weights
    kv_dtype: torch.dtype
    device: torch.device
    group: Group

    @property
    def fused(self) -> "FusedDecoder | None":
        """The layers of Triton kernels of ours, whose kernels start-up chooses; None: others."""

    @property
    def stack(self) -> LayerStack | None:
        """The layers that graphs record; None: a step is computed to its end when launched."""

    @property
    def adapted(self) -> "AdaptedStack | None":
        """The same for passes with rows that have adapters; None: they have none."""

    @property
    def settles_states(self) -> bool:
        """True if states can go back over drafts that are refused."""

    @property
    def states(self) -> StatesBySlot | None:
        """States by slot; None: keys and values are all that a sequence leaves."""

    @property
    def attention_backend(self) -> str:
        """Name of the attention implementation."""

    def kv_layout(self, num_blocks: int, block_size: int) -> str:
        """The sizes of a cache of so many blocks, in words."""

    def kv_plan(self, block_size: int, max_model_len: int) -> KvPlan | None:
        """The KV groups of layers with different windows; None: all layers have one table.

        A cache for a plan is `page_cache.new_cache`; the sizes above and below are those without.
        """

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""

    # Any: a model reads the cache that it has made.
    def new_cache(self, num_blocks: int, block_size: int) -> Any:
        """An empty `PagedCache` for this model."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence; 0: it has none."""

    def make_states(self, max_num_seqs: int, num_snapshots: int) -> None:
        """Allocates the states of all slots, and snapshots of them, where there are any."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Any,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids and positions [T] of a step -> normed hidden states [T, hidden]."""

    def vocab_part(self, hidden: Tensor) -> VocabPart:
        """Hidden states [R, hidden] -> logits of this rank's part of the vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> float32 [R, vocab]; every rank must call it (collective)."""


__all__ = ["ModelShape", "PagedCache", "StatesBySlot", "StepModel"]
