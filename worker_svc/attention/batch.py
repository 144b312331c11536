"""The batch of one step as attention sees it: where its tokens lie, and what they may see.

It depends on the step alone, and not on layers; implementations get it with each call.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from kernels.adapters.stacks import RowGroups
from kernels.attention.paged import Tiles
from worker_svc.attention.pictures import StepPictures


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Who attends to what in a step whose shape only the device knows, as a graph needs it."""

    num_decodes: Tensor  # [1] int32: the leading sequences that compute one token each
    decode_lens: Tensor  # [B] int32, their contexts; -1 for all other sequences
    tiles: Tiles  # of the others' queries


@dataclass(frozen=True, slots=True)
class StateCut:
    """A place between a sequence's tokens whose states go into a snapshot."""

    sequence: int
    num_tokens: int  # of the sequence's, before it
    snapshot: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The places of this step's T tokens of B sequences, and what they may see."""

    slot_mapping: Tensor  # [T] int64, KV slot of each token; negative: padding, not written
    block_tables: Tensor  # [B, W] int32, filled up with the null block 0
    context_lens: Tensor  # [B] int32, tokens with KV after this step
    cu_seqlens_q: Tensor  # [B + 1] int32
    max_seqlen_q: int
    max_context_len: int
    # The leading sequences that compute one token each, and the others; where that is worth a
    # launch more.
    parts: "tuple[AttentionBatch, AttentionBatch] | None" = None
    mixed: MixedBatch | None = None  # in place of parts and lengths, in a graph
    # [B]: whose states each sequence has, of padding below 0; None: of none.
    slots: Tensor | None = None
    state_cuts: tuple[StateCut, ...] = ()  # in order of sequences and tokens
    # True: how far the states of its sequences go is known once drafts are verified.
    has_drafts: bool = False
    pictures: StepPictures | None = None  # of its sequences; None: they have none
    adapters: RowGroups | None = None  # of its tokens, on a device; None: they have none
    # The same for layers of the KV groups after group 0, which have block tables of their own.
    others: "tuple[AttentionBatch, ...]" = ()

    @classmethod
    def of_decodes(
        cls,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        max_context_len: int,
        slots: Tensor | None = None,
    ) -> "AttentionBatch":
        """A batch of sequences that compute one token each, so T = B."""
        return cls(
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            context_lens=context_lens,
            cu_seqlens_q=context_lens,  # a decode batch does not look at it
            max_seqlen_q=1,
            max_context_len=max_context_len,
            slots=slots,
        )

    @property
    def is_decode(self) -> bool:
        """True if every sequence computes exactly one token."""
        return self.max_seqlen_q == 1

    def of_group(self, group: int) -> "AttentionBatch":
        """The batch for layers of a KV group."""
        return self.others[group - 1] if group else self


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens whose logits are wanted: each the last of its sequence, which it attends to."""

    rows: Tensor  # [R] int64, of the step's T
    attention: AttentionBatch  # of R sequences that compute one token each


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The division of a row of the fused projection: the heads of q, then of k, then of v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def fuses(head_dim: int) -> bool:
    """True if the Triton kernels have tiles for heads of this size."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0
