"""The gate on what heads attended to, against torch in float32."""

import pytest
import torch

from kernels.attention.gate import gated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1500), (3, 2048), (0, 32)])
def test_rows_are_multiplied_by_sigmoids_of_a_slice(rows, width, dtype, device, assert_close):
    wide = torch.randn(rows, 3 * width, device=device).mul(4).to(dtype)
    x, gate = torch.randn(rows, width, device=device).to(dtype), wide[:, 2 * width :]
    before = x.clone()
    assert_close(gated(x, gate), x.float() * gate.float().sigmoid())
    assert torch.equal(x, before)


def test_wrong_arguments_are_refused_by_name(device):
    x = torch.randn(4, 32, device=device)
    with pytest.raises(ValueError, match=r"gate torch.Size\(\[4, 16\]\)"):
        gated(x, x[:, :16])
    with pytest.raises(ValueError, match=r"torch\.float16"):
        gated(x, x.half())
    with pytest.raises(ValueError, match="must be contiguous"):
        gated(x, torch.randn(32, 4, device=device).T)
