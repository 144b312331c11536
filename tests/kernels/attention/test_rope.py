"""The fused step between projection and attention against its parts from the reference."""

import pytest
import torch

from kernels import reference
from kernels.attention.rope import norm_rope_write_kv

SHAPES = [  # H, Hkv, D, tokens: few tokens and many take different tiles
    (6, 2, 64, 5),
    (9, 3, 64, 3),
    (4, 4, 128, 70),
]
EPS = 1e-6


def make(heads, kv_heads, dim, tokens, dtype, device, rotated=None):
    """`rotated` are the dimensions of a head that turn; None: all."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    cache = torch.zeros(tokens + 2, 16, 2, kv_heads, dim, dtype=dtype, device=device)
    slots = torch.randperm((tokens + 2) * 16, device=device)[:tokens]
    slots[1] = -1
    positions = torch.randint(0, 500, (tokens,), device=device)
    frequencies = torch.rand((rotated or dim) // 2, device=device)
    angles = torch.arange(500, device=device)[:, None] * frequencies
    return qkv, cache, slots, positions, torch.cat((angles.cos(), angles.sin()), dim=1)


def expected(qkv, cache, slots, positions, cos_sin, heads, weights):
    """q and the cache, in float32, through the reference functions one after the other."""
    kv_heads, dim = cache.shape[3:]
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    q, k, v = (part.reshape(len(qkv), -1, dim) for part in qkv.float().split(sizes, dim=1))
    if weights is not None:
        q, k = (reference.rms_norm(x, w.float(), EPS) for x, w in zip((q, k), weights, strict=True))
    q, k = reference.rotary_embedding(q, k, positions, cos_sin)
    filled = torch.zeros_like(cache, dtype=torch.float32)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            filled[slot // 16, slot % 16] = torch.stack((k[token], v[token]))
    return q, filled


def check(shape, normed, dtype, device, assert_close, rotated=None):
    heads, _, dim, _ = shape
    qkv, cache, slots, positions, cos_sin = make(*shape, dtype, device, rotated)
    weights = [torch.randn(dim, device=device).to(dtype) for _ in range(2)] if normed else None
    before = qkv.clone()
    q = norm_rope_write_kv(
        qkv, positions, cos_sin, cache[:, :, 0], cache[:, :, 1], slots, *(weights or ()), eps=EPS
    )
    want_q, want_cache = expected(before, cache, slots, positions, cos_sin, heads, weights)
    assert_close(q, want_q)
    assert_close(cache, want_cache)
    assert torch.equal(cache == 0, want_cache == 0)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_product_is_divided_by_the_root_mean_squares_of_its_rows(
    shape, normed, device, assert_close
):
    heads, _, dim, tokens = shape
    qkv, cache, slots, positions, cos_sin = make(*shape, torch.float32, device)
    weights = [torch.randn(dim, device=device) for _ in range(2)] if normed else None
    rows = torch.randn(tokens, 1100, device=device) * positions[:, None] / 100
    q = norm_rope_write_kv(
        qkv, positions, cos_sin, cache[:, :, 0], cache[:, :, 1], slots, *(weights or (None, None)),
        eps=EPS, rms_of=rows,
    )  # fmt: skip
    divided = qkv * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt()
    want_q, want_cache = expected(divided, cache, slots, positions, cos_sin, heads, weights)
    assert_close(q, want_q)
    assert_close(cache, want_cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_are_rotated_and_keys_and_values_stored(shape, normed, dtype, device, assert_close):
    check(shape, normed, dtype, device, assert_close)


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("shape", "rotated"), [((9, 3, 64, 3), 32), ((3, 1, 64, 66), 44), ((6, 2, 16, 5), 2)]
)
def test_dimensions_after_the_rotated_ones_are_normed_alone(
    shape, rotated, normed, device, assert_close
):
    check(shape, normed, torch.float32, device, assert_close, rotated)
    check(shape, normed, torch.float16, device, assert_close, rotated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize("shape", [(9, 3, 64, 3), (2, 1, 16, 66)])
def test_one_norm_may_be_of_all_heads(shape, is_divided, dtype, device, assert_close):
    heads, kv_heads, dim, tokens = shape
    qkv, cache, slots, positions, cos_sin = make(*shape, dtype, device, rotated=8)
    qkv *= 1e-2  # so small that it matters what is added to the mean square
    weights = [torch.randn(n * dim, device=device).to(dtype) for n in (heads, kv_heads)]
    rows = torch.randn(tokens, 1100, device=device) / 4 if is_divided else None
    q = norm_rope_write_kv(
        qkv, positions, cos_sin, cache[:, :, 0], cache[:, :, 1], slots, *weights, eps=1e-4,
        rms_of=rows,
    )  # fmt: skip
    divided = qkv.float()
    if rows is not None:
        divided = divided * (rows.square().mean(-1, keepdim=True) + 1e-4).rsqrt()
    sizes = heads * dim, kv_heads * dim, kv_heads * dim
    *parts, values = divided.split(sizes, dim=1)
    normed = [reference.rms_norm(x, w.float(), 1e-4) for x, w in zip(parts, weights, strict=True)]
    whole = torch.cat((*normed, values), 1)
    want_q, want_cache = expected(whole, cache, slots, positions, cos_sin, heads, None)
    assert_close(q, want_q)
    assert_close(cache, want_cache)
    with pytest.raises(ValueError, match="norm weights must be"):
        norm_rope_write_kv(
            qkv, positions, cos_sin, cache[:, :, 0], cache[:, :, 1], slots, weights[0], weights[0]
        )


def test_wrong_arguments_are_refused_by_name(device):
    qkv, cache, slots, positions, cos_sin = make(4, 2, 64, 3, torch.float32, device)
    k_cache, v_cache = cache[:, :, 0], cache[:, :, 1]
    weight = torch.ones(64, device=device)
    with pytest.raises(ValueError, match="q_weight and k_weight come together"):
        norm_rope_write_kv(qkv, positions, cos_sin, k_cache, v_cache, slots, weight)
    with pytest.raises(TypeError, match="int64"):
        norm_rope_write_kv(qkv, positions.int(), cos_sin, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="cos_sin must be contiguous"):
        norm_rope_write_kv(qkv, positions, cos_sin[:, :32], k_cache, v_cache, slots)
    for wrong in (cos_sin[:, :33].contiguous(), torch.cat((cos_sin, cos_sin), 1)):
        with pytest.raises(ValueError, match=r"contiguous \[P, R\], an even R up to 64"):
            norm_rope_write_kv(qkv, positions, wrong, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="do not hold heads"):
        norm_rope_write_kv(qkv[:, :256], positions, cos_sin, k_cache, v_cache, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 8, 256, 4000])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_real_sizes_in_bfloat16(tokens, normed, device, assert_close):
    check((16, 8, 128, tokens), normed, torch.bfloat16, device, assert_close)
