"""The norms of groups with a gate, against those in plain PyTorch."""

import pytest
import torch

from kernels.recurrent import delta_rule, selective_scan
from kernels.recurrent.gated_norm import gated_rms_norm

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_groups", "size"), [(1, 40), (3, 24), (33, 16), (2, 700)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_groups_are_normed_and_gated(gate_first, num_groups, size, dtype, device, assert_close):
    width = num_groups * size
    gate = torch.randn(5, width + 8, device=device).to(dtype)[:, :width]  # of a wider projection
    if gate_first:
        x, weight = (
            torch.randn(*shape, device=device).to(dtype) for shape in ((5, width), (width,))
        )
        exact = [each.float() for each in (x, gate, weight)]
        expected = selective_scan.gated_rms_norm(*exact, num_groups, EPS)
    else:
        x, weight = torch.randn(5, width, device=device), torch.randn(size, device=device).to(dtype)
        heads = x.view(5, num_groups, size), gate.float().view(5, num_groups, size)
        expected = delta_rule.gated_rms_norm(*heads, weight.float(), EPS).flatten(1)
    found = gated_rms_norm(x, gate, weight, num_groups, EPS, gate_first=gate_first)
    assert found.dtype == dtype
    assert_close(found, expected)
