"""Rounding float weights to integers: how far off an element may be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.quantized.rounding import HALF_ERROR, quantized


def worst_allowed(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Half a step, that of a zero point, and the rounding of the scale, by group [N, groups]."""
    values = weight.float().view(len(weight), -1, group)
    most = values.abs().amax(-1)
    if bits == 8:
        return 0.5 * most / 127 + 3 * HALF_ERROR * most + 1e-30
    least, largest = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    return (0.5 + 1 / 16) * (largest - least) / 15 + 3 * HALF_ERROR * most + 1e-30


@given(
    st.sampled_from((4, 8)),
    st.sampled_from((16, 32, 48, 128)),
    st.floats(-30, 30),
    st.floats(-3, 3),
    st.integers(0, 999),
)
def test_no_element_is_off_by_more_than_half_a_step(
    bits: int, group: int, exponent: float, shift: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn((5, 3 * group), generator=generator) + shift) * 2.0**exponent
    weight[1, :group] = weight[1, 0]
    weight[2] = 0
    found = quantized(weight, bits, group)
    assert (found.bits, found.group) == (bits, group)
    off = (found.dequantized() - weight).abs().view(5, 3, group).amax(-1)
    assert bool((off <= worst_allowed(weight, bits, group)).all())
    assert bool((off[2] == 0).all())
    assert found.rounds_rows
    assert found.zeros() is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_for_fewer_weights_lose_less(bits: int) -> None:
    weight = torch.randn((8, 128), generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-2, 2, 8)[:, None]  # outputs of different sizes
    # One scale for all of them, one for each output, and for a quarter of its inputs.
    kinds = (weight.view(1, -1), weight, weight.view(-1, 32))
    off = [(quantized(one, bits, one.shape[1]).dequantized() - one).norm() for one in kinds]
    assert off[0] > off[1] > off[2] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_weights_get_float16_scales(dtype: torch.dtype) -> None:
    found = quantized(torch.randn(8, 64).to(dtype) / 30, 4, 32)
    assert torch.equal(found.scales.half().float(), found.scales)


@pytest.mark.parametrize(
    ("bits", "group", "value", "match"),
    [
        (5, 32, 0.0, "bits: 5 is none of"),
        (4, 48, 0.0, "group: 48 does not divide 64"),
        (4, 0, 0.0, "group: 0 does not divide 64"),
        (4, 32, torch.inf, "not every element is finite"),
    ],
)
def test_what_cannot_be_rounded_is_refused(bits: int, group: int, value: float, match: str) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = value
    with pytest.raises(ValueError, match=match):
        quantized(weight, bits, group)
