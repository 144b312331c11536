"""Device and reference data for the kernel tests."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.attention_kind import AttentionKind
from tests.kernels.interpreted import mend_products, quicken

quicken()
mend_products()


@pytest.fixture
def device() -> torch.device:
    """The GPU if there is one; otherwise the CPU, with Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """Asserts a small relative distance of two tensors, by the precision of the first's dtype."""
    bounds = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.shape == expected.shape
        distance = (actual.double() - expected.double()).norm()
        assert distance <= bounds[actual.dtype] * expected.double().norm()

    return check


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences with keys and values in shuffled blocks; block 0 and unused entries are NaN."""

    k_cache: Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: Tensor
    block_tables: Tensor  # [B, W] int32
    context_lens: Tensor  # [B] int32

    def attention(
        self,
        q: Tensor,
        cu_seqlens_q: list[int],
        kind: AttentionKind,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention with a dense float32 softmax per sequence."""
        out = torch.zeros(q.shape, device=q.device)
        block_size, num_kv_heads = self.k_cache.shape[1:3]
        for i, context in enumerate(self.context_lens.tolist()):
            start, end = cu_seqlens_q[i], cu_seqlens_q[i + 1]
            if context == 0 or start == end:
                continue
            at = torch.arange(context, device=q.device)
            blocks = self.block_tables[i, at // block_size].long()
            share = q.shape[1] // num_kv_heads
            k = self.k_cache[blocks, at % block_size].float().repeat_interleave(share, 1)
            v = self.v_cache[blocks, at % block_size].float().repeat_interleave(share, 1)
            scores = torch.einsum("qhd,nhd->hqn", q[start:end].float(), k) * kind.scale
            last_seen = torch.arange(context - (end - start), context, device=q.device)
            if kind.softcap:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            scores = scores.masked_fill(at > last_seen[:, None], -math.inf)
            if kind.window:
                is_far = at <= last_seen[:, None] - kind.window
                scores = scores.masked_fill(is_far, -math.inf)
            if sinks is not None:
                shares = sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
                scores = torch.cat((scores, shares), -1)
            weights = scores.softmax(-1)[..., :context]
            out[start:end] = torch.einsum("hqn,nhd->qhd", weights, v)
        return out


@pytest.fixture
def paged(device: torch.device) -> Callable[..., Paged]:
    """Makes a `Paged` from contexts, (Hkv, D) and a block size."""

    def make(
        contexts: list[int],
        kv_shape: tuple[int, int],
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Paged:
        generator = torch.Generator().manual_seed(len(contexts) + block_size)
        widths = [-(-context // block_size) for context in contexts]
        ids = (torch.randperm(sum(widths), generator=generator) + 1).int()
        shape = (sum(widths) + 1, block_size, 2, *kv_shape)
        # Keys and values are interleaved, so that the caches are not contiguous.
        cache = torch.full(shape, math.nan, dtype=dtype, device=device)
        tables = torch.zeros(len(contexts), max(widths) + 2, dtype=torch.int32)
        for i, row in enumerate(ids.split(widths)):
            tables[i, : len(row)] = row
            for j, block in enumerate(row.tolist()):
                filled = min(block_size, contexts[i] - j * block_size)
                values = torch.randn((filled, 2, *kv_shape), generator=generator)
                cache[block, :filled] = values.to(device, dtype)
        lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        return Paged(cache[:, :, 0], cache[:, :, 1], tables.to(device), lens)

    return make
