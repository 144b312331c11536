"""Kernels that attend over latents, against the reference: all heads read the same rows."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.attention import latent_attention as latents
from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import tokens_per_tile
from kernels.attention_kind import AttentionKind

KIND = AttentionKind(0.15)
# Heads, latent, rotated key: no power of two, as GLM-4.7-Flash's heads, and one that fills tiles.
SIZES = [(5, 24, 8), (20, 40, 16), (16, 64, 32), (3, 16, 4)]


def queries(count: int, size: tuple[int, int, int], dtype: torch.dtype, device) -> Tensor:
    heads, latent, turned = size
    generator = torch.Generator().manual_seed(count + heads)
    return torch.randn(count, heads, latent + turned, generator=generator).to(device, dtype)


def expected(q: Tensor, cache, v_dim: int, starts: list[int]) -> Tensor:
    """The sums in float32, with zeros in place of rows that no sequence has."""
    rows = cache.k_cache.float().nan_to_num(0.0)
    tables, lens = cache.block_tables, cache.context_lens
    cu = torch.tensor(starts, dtype=torch.int32, device=q.device)
    most = max(end - start for start, end in pairwise(starts))
    return reference.latent_attention(q.float(), rows, v_dim, tables, lens, cu, most, KIND)


@pytest.fixture
def few_programs(monkeypatch):
    """Contexts of a few blocks are cut into splits, of which each is a program to interpret."""
    monkeypatch.setattr(latents, "_PROGRAMS", 16)
    monkeypatch.setattr(latents, "_MIN_SPLIT", 16)
    monkeypatch.setattr(latents, "_MERGED", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("contexts", [[1, 77, 16], [64]], ids=["several", "one"])
def test_a_query_of_each_sequence(contexts, size, dtype, paged, device, assert_close, few_programs):
    """Contexts of one token, up to a block's border, and of several splits with a short last one.

    One row has so many programs that some have no split.
    """
    _, v_dim, turned = size
    cache = paged(contexts, (1, v_dim + turned), 8, dtype)
    q = queries(len(contexts), size, dtype, device)
    found = latents.latent_decode_attention(
        q, cache.k_cache, v_dim, cache.block_tables, cache.context_lens, KIND
    )
    assert_close(found, expected(q, cache, v_dim, [*range(len(contexts) + 1)]))


def test_a_row_without_context_gives_zeros(paged, device, few_programs):
    size = SIZES[0]
    cache = paged([0, 40], (1, 32), 8)
    out = torch.full((2, 5, 24), math.nan, device=device)
    found = latents.latent_decode_attention(
        queries(2, size, torch.float32, device), cache.k_cache, 24, cache.block_tables,
        cache.context_lens, KIND, out,
    )  # fmt: skip
    assert found is out
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES[:3])
def test_prompts_chunks_and_decodes_of_one_step(size, dtype, paged, device, assert_close):
    """Causal from the first token, after a cached context, and by tiles that cross tokens."""
    _, v_dim, turned = size
    contexts, counts = [19, 45, 33, 0, 8], [19, 7, 1, 0, 2]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    cache = paged(contexts, (1, v_dim + turned), 8, dtype)
    q = queries(sum(counts), size, dtype, device)
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    found = latents.latent_attention(
        q, cache.k_cache, v_dim, cache.block_tables, cache.context_lens, cu, 19, KIND
    )
    assert_close(found, expected(q, cache, v_dim, starts))


@pytest.mark.parametrize("num_decodes", [0, 1, 3])
def test_a_step_whose_shape_the_device_knows(num_decodes, paged, device, few_programs):
    """Decodes lead; tiles are of the others' queries; nothing else is written."""
    size = heads, v_dim, turned = SIZES[1]
    contexts, counts = [17, 40, 9, 21, 35], [1, 1, 1, 21, 3]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    cache = paged(contexts, (1, v_dim + turned), 8)
    q = queries(sum(counts), size, torch.float32, device)
    is_decode = torch.arange(5, device=device) < num_decodes
    out = torch.full((len(q), heads, v_dim), math.nan, device=device)
    count = torch.tensor([num_decodes], dtype=torch.int32, device=device)
    latents.latent_decode_attention(
        q, cache.k_cache, v_dim, cache.block_tables, cache.context_lens.where(is_decode, -1), KIND,
        out, count,
    )  # fmt: skip
    wanted = expected(q, cache, v_dim, starts)
    torch.testing.assert_close(out[:num_decodes], wanted[:num_decodes])
    assert out[num_decodes:].isnan().all()
    tokens = tokens_per_tile(21, (heads, 1), v_dim + turned, 4)
    tiles = [(3, first) for first in range(0, 21, tokens)] + [(4, 0), (-1, 0)]
    rows, firsts = torch.tensor(tiles, dtype=torch.int32, device=device).T.contiguous()
    latents.attend_latent_tiles(
        q, cache.k_cache, v_dim, cache.block_tables, cache.context_lens,
        torch.tensor(starts, dtype=torch.int32, device=device), Tiles(rows, firsts, 21), KIND, out,
    )  # fmt: skip
    torch.testing.assert_close(out[3:], wanted[3:])


def test_wrong_arguments_are_refused_by_name(paged, device):
    cache = paged([9, 4], (1, 32), 8)
    q = queries(2, SIZES[0], torch.float32, device)

    def attend(q=q, v_dim=24, kind=KIND, tables=cache.block_tables, out=None):
        latents.latent_decode_attention(
            q, cache.k_cache, v_dim, tables, cache.context_lens, kind, out
        )

    attend()
    with pytest.raises(ValueError, match="window 4 is not served over latents"):
        attend(kind=AttentionKind(0.1, window=4))
    with pytest.raises(ValueError, match="values of 32"):
        attend(v_dim=32)
    with pytest.raises(TypeError, match=r"q is torch\.float16"):
        attend(q=q.half())
    with pytest.raises(ValueError, match="must be contiguous"):
        attend(q=q.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(TypeError, match="must be int32"):
        attend(tables=cache.block_tables.long())
    with pytest.raises(ValueError, match="out must be contiguous"):
        attend(out=torch.empty_like(q))
    with pytest.raises(ValueError, match="1 queries, 2 lengths"):
        attend(q=q[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_real_sizes_in_bfloat16(heads, paged, device, assert_close):
    size = heads, 512, 64
    contexts = [1, 16, 700, 4100]
    cache = paged(contexts, (1, 576), 16, torch.bfloat16)
    q = queries(4, size, torch.bfloat16, device)
    found = latents.latent_decode_attention(
        q, cache.k_cache, 512, cache.block_tables, cache.context_lens, AttentionKind(0.15)
    )
    assert_close(found, expected(q, cache, 512, [0, 1, 2, 3, 4]))
