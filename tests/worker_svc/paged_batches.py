"""Batches over a paged KV cache with shuffled blocks, and their expected attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind
from worker_svc.attention.batch import AttentionBatch, HeadLayout
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Queries of a step and their KV cache. Unused cache entries are large, so that reading them
    changes the result."""

    heads: HeadLayout
    q: Tensor  # [T, H, D]
    cache: KVCache
    batch: AttentionBatch

    @classmethod
    def make(
        cls,
        sequences: Sequence[tuple[int, int]],
        heads: HeadLayout,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PagedBatch":
        """A batch of sequences with these (context, queries)."""
        contexts, lengths = map(list, zip(*sequences, strict=True))
        random = torch.Generator().manual_seed(len(sequences) + block_size)
        widths = [-(-context // block_size) for context in contexts]
        tables = torch.zeros(len(sequences), max(widths) + 2, dtype=torch.int32)
        ids = (torch.randperm(sum(widths), generator=random) + 1).int()
        num_blocks = sum(widths) + 1
        cache = KVCache(
            1, num_blocks, block_size, heads.num_kv_heads, heads.head_dim, dtype, device
        )
        rows = cache.rows(0)  # [slots, 2, Hkv, D]
        rows.fill_(100.0)
        for table, own, context in zip(tables, ids.split(widths), contexts, strict=True):
            table[: len(own)] = own
            at = torch.arange(context)
            slots = table[at // block_size].long() * block_size + at % block_size
            values = torch.randn((context, *rows.shape[1:]), generator=random)
            rows[slots.to(device)] = values.to(device, dtype)
        q = torch.randn(sum(lengths), heads.num_heads, heads.head_dim, generator=random)
        batch = AttentionBatch(
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
            block_tables=tables.to(device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            max_seqlen_q=max(lengths),
            max_context_len=max(contexts),
        )
        return cls(heads, q.to(device, dtype), cache, batch)

    def expected(self, kind: AttentionKind) -> Tensor:
        """Attention by the reference, in float32."""
        batch = self.batch
        plan = reference.AttentionPlan.build(
            batch.block_tables, batch.context_lens, batch.cu_seqlens_q, self.cache.block_size,
            torch.float32, kind,
        )  # fmt: skip
        return reference.attend(self.q.float(), self.cache.rows(0).float(), plan, kind)

    def call(self, kind: AttentionKind, out: Tensor | None = None) -> AttentionCall:
        """The attention of a layer of this kind."""
        return AttentionCall(self.q, self.cache.of_layer(0), self.batch, kind, out=out)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Asserts equality within the precision of the first tensor's dtype, relative to its norm."""
    assert found.shape == expected.shape
    bound = {torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
    distance = (found.double() - expected.double()).norm()
    assert distance <= bound * expected.double().norm()
