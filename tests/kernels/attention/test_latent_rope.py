"""The kernel between projections and attention over latents, against parts of the reference."""

import math

import pytest
import torch

from kernels import reference
from kernels.attention.latent_rope import rotate_write_latents

EPS, BLOCK_SIZE = 1e-6, 8
# Tokens, heads, numbers of a query that are not rotated, those that are, and those of a latent.
SIZES = [(5, 4, 12, 8, 24), (3, 20, 16, 64, 40), (1, 9, 4, 6, 16), (9, 1, 3, 2, 100)]


def made(size, dtype, device):
    """(q, kv, positions, table, norm, cache, slots); one token is padding, if there are several."""
    tokens, heads, nope, turned, latent = size
    q = torch.randn(tokens, heads, nope + turned, device=device).to(dtype)
    kv = torch.randn(tokens, latent + turned, device=device).to(dtype)
    positions = torch.randint(0, 200, (tokens,), device=device)
    angles = torch.arange(200, device=device)[:, None] * torch.rand(turned // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    norm = torch.rand(latent, device=device).to(dtype) + 0.5
    cache = torch.zeros(4, BLOCK_SIZE, 1, latent + turned, device=device).to(dtype)
    slots = torch.randperm(4 * BLOCK_SIZE, device=device)[:tokens]
    slots[1:2] = -1
    return q, kv, positions, table, norm, cache, slots


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_queries_are_rotated_and_rows_stored(size, dtype, is_interleaved, device, assert_close):
    q, kv, positions, table, norm, cache, slots = made(size, dtype, device)
    _, _, nope, _, latent = size
    before = q.clone(), kv.clone()
    queries = rotate_write_latents(
        q, kv, positions, table, norm, EPS, cache, slots, is_interleaved=is_interleaved
    )
    turned = torch.cat((q[..., nope:], kv[:, None, latent:]), dim=1).float()
    if is_interleaved:
        turned = reference.pairs_apart(turned)
    turned = reference.rotate(turned, *reference.rotary_rows(table, positions, torch.float32))
    assert_close(queries[..., latent:], turned[:, :-1])
    normed = reference.rms_norm(kv[:, :latent].float(), norm.float(), EPS)
    rows, wanted = cache.flatten(0, 2), torch.cat((normed, turned[:, -1]), dim=1)
    kept = slots >= 0
    assert_close(rows[slots[kept]], wanted[kept])
    others = torch.ones(len(rows), dtype=torch.bool, device=device)
    others[slots[kept]] = False
    assert (rows[others] == 0).all()
    assert torch.equal(q, before[0]) and torch.equal(kv, before[1])


def test_a_norm_in_float32_is_applied_before_rows_are_rounded(device, assert_close):
    q, kv, positions, table, norm, cache, slots = made(SIZES[0], torch.float16, device)
    weight = norm.float() + 2**-12
    rotate_write_latents(q, kv, positions, table, weight, EPS, cache, slots, is_interleaved=False)
    found = cache.flatten(0, 2)[slots[2:], :24]
    wanted = reference.rms_norm(kv[2:, :24], weight, EPS)
    assert (found - wanted).abs().max() <= 2**-9


def test_wrong_arguments_are_refused_by_name(device):
    q, kv, positions, table, norm, cache, slots = made(SIZES[0], torch.float32, device)

    def run(q=q, kv=kv, positions=positions, table=table, cache=cache):
        rotate_write_latents(q, kv, positions, table, norm, EPS, cache, slots, is_interleaved=True)

    run()
    with pytest.raises(ValueError, match="latents of 24"):
        run(kv=kv[:, :-1].contiguous())
    with pytest.raises(ValueError, match="latents of 24"):
        run(q=q[..., :8].contiguous())
    with pytest.raises(ValueError, match="does not hold rows of 32"):
        run(cache=cache[..., :31])
    with pytest.raises(ValueError, match="must be contiguous"):
        run(q=q.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(TypeError, match=r"cache\.dtype"):
        run(cache=cache.half())
    with pytest.raises(TypeError, match="int64"):
        run(positions=positions.int())


@pytest.mark.gpu
def test_real_sizes_in_bfloat16(device, assert_close):
    size = 70, 128, 128, 64, 512
    q, kv, positions, table, norm, cache, slots = made((30, *size[1:]), torch.bfloat16, device)
    queries = rotate_write_latents(
        q, kv, positions, table, norm, EPS, cache, slots, is_interleaved=True
    )
    turned = reference.pairs_apart(q[..., 128:].float())
    wanted = reference.rotate(turned, *reference.rotary_rows(table, positions, torch.float32))
    assert_close(queries[..., 512:], wanted)
    assert math.isfinite(float(cache.float().sum()))
