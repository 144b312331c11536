"""Writing to the cache, slot by slot."""

import pytest
import torch

from kernels.attention.write_kv import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(2, 64, 16), (3, 64, 4), (8, 128, 32)])
def test_rows_land_in_their_slots_and_nowhere_else(kv_heads, dim, block_size, dtype, device):
    k, v = (torch.randn(5, kv_heads, dim, device=device).to(dtype) for _ in range(2))
    cache = torch.zeros(6, block_size, 2, kv_heads, dim, dtype=dtype, device=device)
    slots = torch.tensor([3 * block_size + 1, -1, 0, 6 * block_size - 1, -7], device=device)
    write_kv(k, v, cache[:, :, 0], cache[:, :, 1], slots)
    expected = torch.zeros_like(cache)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, slot % block_size, 0] = k[token]
            expected[slot // block_size, slot % block_size, 1] = v[token]
    assert torch.equal(cache, expected)


def test_keys_may_be_slices_of_the_fused_projection(device):
    qkv = torch.randn(3, (4 + 2 + 2) * 64, device=device)
    k, v = (part.view(3, 2, 64) for part in qkv[:, 4 * 64 :].split(128, dim=1))
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 64, device=device)
    write_kv(k, v, k_cache, v_cache, torch.tensor([0, 5, 7], device=device))
    assert torch.equal(k_cache.flatten(0, 1)[[0, 5, 7]], k)
    assert torch.equal(v_cache.flatten(0, 1)[[0, 5, 7]], v)


def test_wrong_arguments_are_refused_by_name(device):
    k = torch.randn(2, 2, 64, device=device)
    cache = torch.zeros(2, 4, 2, 64, device=device)
    with pytest.raises(ValueError, match="slot_mapping must be int64"):
        write_kv(k, k, cache, cache, torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="does not hold"):
        write_kv(k, k, cache[..., :32], cache[..., :32], torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="float16"):
        write_kv(k.half(), k.half(), cache, cache, torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
def test_slots_beyond_32_bits_are_reached(device):
    num_blocks = 2**31 // (16 * 8 * 128) + 2
    k, v = (torch.randn(1, 8, 128, device=device).bfloat16() for _ in range(2))
    caches = [
        torch.zeros(num_blocks, 16, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2)
    ]
    write_kv(k, v, *caches, torch.tensor([num_blocks * 16 - 1], device=device))
    assert torch.equal(caches[0][-1, -1], k[0])
    assert torch.equal(caches[1][-1, -1], v[0])
