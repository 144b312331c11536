"""The interface of layers that graphs record: whole passes, and a pass in two parts.

What launches no kernel of its own and waits for nothing on the host can be recorded: graphs know
no more than this of the layers between a step's tokens and its hidden states.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from worker_svc.attention.batch import AttentionBatch, LastTokens


@dataclass(frozen=True, slots=True)
class TileHeads:
    """The heads by which queries of prompts are divided into tiles; the same in all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class LayerStack(Protocol):
    """All layers of a model and the final norm."""

    @property
    def splits(self) -> bool:
        """True if `begin` and `finish` can be recorded, for steps with prompts."""

    @property
    def carried_widths(self) -> tuple[int, int]:
        """The widths of the two tensors that `begin` leaves for `finish`."""

    @property
    def tile_heads(self) -> TileHeads:
        """The heads of all layers' attention."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Any,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids [T] -> normed hidden states [T, hidden], or with `last` [R, hidden]."""

    def begin(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Any, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """All that every token needs -> what is carried, [T, width] each.

        All keys and values are in the cache then.
        """

    def finish(
        self, carried: tuple[Tensor, Tensor], kv_cache: Any, batch: AttentionBatch
    ) -> Tensor:
        """The rest for rows [R] of what is carried -> normed hidden states [R, hidden].

        What is carried may be overwritten. `batch` is that of the rows, a token each.
        """

    def rehearsed(self) -> "LayerStack":
        """A stack that launches every kind of kernel at less cost, for rehearsals."""
