"""The gated activation against its reference, computed in float32."""

import pytest
import torch

from kernels import reference
from kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 200), (5, 3072)])
def test_the_first_half_gates_the_second(shape, dtype, device, assert_close):
    x = torch.randn(shape, device=device).to(dtype) * 3
    assert_close(silu_and_mul(x), reference.silu_and_mul(x.float()))


def test_a_large_negative_gate_closes(device):
    x = torch.tensor([[-80.0, 5.0]], device=device)
    assert abs(silu_and_mul(x).item()) < 1e-30


def test_an_odd_width_is_refused(device):
    with pytest.raises(ValueError, match=r"even width, got \(2, 3\)"):
        silu_and_mul(torch.randn(2, 3, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 6144), (256, 6144), (8192, 24576)])
def test_real_sizes_in_bfloat16(shape, device, assert_close):
    x = torch.randn(shape, device=device).bfloat16()
    assert_close(silu_and_mul(x), reference.silu_and_mul(x.float()))
