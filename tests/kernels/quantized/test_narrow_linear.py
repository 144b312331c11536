"""Products with weights in 4 and 8 bits, against the numbers that these stand for."""

from dataclasses import replace

import pytest
import torch

from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.linear import dequantized, linear
from kernels.quantized.narrow import NarrowWeight
from kernels.quantized.scaled import ScaledWeight
from tests.pairs import pairwise

LAYOUTS = {
    "int4 by 32": (4, 32),
    "int4 by 128": (4, 128),
    "int4 by 96, in tiles of 32": (4, 96),
    "int4 by 16, as bytes": (4, 16),
    "int8 by 16": (8, 16),
    "int8 by channel": (8, 0),
    "fp8 by channel": (0, 0),
    "fp8 by 64": (0, 64),
    "fp8 by 128, the last shorter": (0, 128),
}
SHAPES = [(1, 40, 384), (3, 17, 768), (8, 16, 384), (32, 50, 1152)]


def drawn(layout: str, n: int, k: int) -> GroupedWeight | ScaledWeight:
    bits, group = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(n + k)
    if "shorter" in layout:
        k -= 64
    if bits == 0:
        return ScaledWeight.concatenated(
            [ScaledWeight.rounded(torch.randn((n, k), generator=generator)).regrouped(group or k)]
        )
    size = group or k
    integers = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand((n, k // size), generator=generator) + 0.5
    offsets = -scales * 2 ** (bits - 1)
    return GroupedWeight(integers, scales, offsets, bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_narrow_layout_keeps_the_numbers(layout, device):
    weight = drawn(layout, 20, 384)
    narrow = NarrowWeight.of(weight.to(device))
    assert narrow is not None and narrow.shape == weight.shape
    found, expected = dequantized(narrow, torch.float32).cpu(), weight.dequantized()
    # A GPU rounds once where the reference rounds product and sum.
    near = {"rtol": 0.0, "atol": 0.0} if device.type == "cpu" else {"rtol": 1e-6, "atol": 1e-4}
    torch.testing.assert_close(found, expected, **near)
    if layout.startswith("int4") and "bytes" not in layout:
        assert narrow.data.nbytes * 2 == weight.integers.nbytes


@pytest.mark.parametrize("bits", [4, 8])
def test_the_order_of_lanes_is_that_of_their_words(bits):
    """Column by column, as the kernels in CUDA C read them."""
    integers = torch.arange(128 * 3, dtype=torch.int32).view(3, 128) % (1 << bits)
    scales = torch.ones(3, 4)
    weight = GroupedWeight(integers.to(torch.uint8), scales, -8 * scales, bits)
    data = NarrowWeight.of(weight).by_lanes().data.tolist()
    in_word = 32 // bits
    for row in range(3):
        for column in range(128):
            segment, in_segment = divmod(column, 16 * in_word)
            quarter, in_quarter = divmod(in_segment, 4 * in_word)
            lane, at = divmod(in_quarter, in_word)
            word = data[row][segment * 64 + lane * 16 + quarter * 4 :][:4]
            pair, upper = divmod(at, 2)  # two columns are 16 bits apart, pairs 8 or 4
            bit = pair * bits + 16 * upper
            found = int.from_bytes(bytes(word), "little") >> bit & ((1 << bits) - 1)
            assert found == integers[row, column]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_exact", [True, False])
def test_by_lanes_the_numbers_are_the_same(layout, is_exact, device):
    weight = drawn(layout, 20, 384)
    if isinstance(weight, GroupedWeight):
        scales = weight.scales.half().float()
        offsets = -scales * 2 ** (weight.bits - 1) * (1.0 if is_exact else 1.01)
        weight = replace(weight, scales=scales, offsets=offsets)
    plain = NarrowWeight.of(weight.to(device))
    by_lanes = plain.by_lanes()
    assert by_lanes.is_float is plain.is_float and by_lanes.shape == plain.shape
    if isinstance(weight, GroupedWeight):
        has_steps = weight.bits == plain.bits  # zero points of 4 bits stored as 8 are no MIDDLE
        assert by_lanes.is_paired is (is_exact and has_steps)
        assert by_lanes.nbytes == plain.nbytes - by_lanes.is_paired * plain.offsets.nbytes
    expected = dequantized(plain, torch.float32)
    torch.testing.assert_close(dequantized(by_lanes, torch.float32), expected, rtol=0.0, atol=0.0)


def test_bytes_that_are_no_segments_have_no_order_of_lanes(device):
    narrow = NarrowWeight.of(drawn("int4 by 32", 20, 96).to(device))
    with pytest.raises(ValueError, match="48 bytes of an output are no segments"):
        narrow.by_lanes()
    by_lanes = NarrowWeight.of(drawn("int4 by 32", 20, 384).to(device)).by_lanes()
    with pytest.raises(ValueError, match="its integers are in the order of lanes"):
        linear(torch.randn(2, 384, device=device), by_lanes)


@pytest.mark.parametrize(
    ("shape", "layout", "added", "dtype"),
    pairwise(
        SHAPES, list(LAYOUTS), ["", "bias", "residual", "bias residual"],
        [torch.float32, torch.float16],
    ),
)  # fmt: skip
def test_a_product_is_that_of_the_numbers(shape, layout, added, dtype, device, assert_close):
    m, n, k = shape
    weight = drawn(layout, n, k)
    k = weight.shape[1]
    x = torch.randn(m, k, device=device, dtype=dtype)
    bias = torch.randn(n, device=device, dtype=dtype) if "bias" in added else None
    residual = torch.randn(m, n, device=device, dtype=dtype) if "residual" in added else None
    narrow = NarrowWeight.of(weight.to(device))
    y = x.float() @ weight.dequantized(dtype).to(device).float().T
    for term in (bias, residual):
        if term is not None:
            y = y + term.float()
    assert_close(linear(x, narrow, bias, residual), y)


def test_every_float8_value_is_widened_exactly(device):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].reshape(2, 127)
    weight = ScaledWeight(codes.view(torch.float8_e4m3fn), torch.ones(2, 1), 127)
    wide = dequantized(NarrowWeight.of(weight.to(device)), torch.float32).cpu()
    assert torch.equal(wide, weight.values.float())
    assert wide.max() == 448 and wide[0, 1] == 2**-9  # the largest, and the least above zero


def test_groups_that_are_no_tiles_have_no_narrow_layout(device):
    weight = GroupedWeight(
        torch.zeros((4, 48), dtype=torch.uint8), torch.ones(4, 6), torch.zeros(4, 6), 4
    )
    assert NarrowWeight.of(weight.to(device)) is None


def test_what_the_kernel_does_not_compute_is_refused_by_name(device):
    weight = NarrowWeight.of(drawn("int8 by 16", 20, 384).to(device))
    x = torch.randn(2, 384, device=device)
    with pytest.raises(ValueError, match=r"x must be \[1..32, 384\], it is \[33, 384\]"):
        linear(torch.randn(33, 384, device=device), weight)
    with pytest.raises(ValueError, match=r"bias must be \[20\]"):
        linear(x, weight, torch.zeros(21, device=device))
    with pytest.raises(ValueError, match=r"residual must be contiguous \[2, 20\]"):
        linear(x, weight, None, torch.zeros(3, 20, device=device))
