"""C kernels against their references, for each instruction set of this machine and each dtype."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import isa
from kernels.cpu.library import Library
from tests.kernels.cpu.cpu_cases import COMBINATIONS, randn, require, unaligned

# Odd sizes, whole vectors, whole panels, and more than a block of inputs.
SIZES = [(1, 1), (7, 17), (16, 16), (17, 33), (48, 80), (577, 96), (576, 130), (1536, 32)]
ROWS = [1, 2, 3, 5, 8, 9, 17, 33, 100]
Check = Callable[[Tensor, Tensor], None]


@pytest.fixture(params=COMBINATIONS)
def library(request: pytest.FixtureRequest) -> Library:
    return require(*request.param)


@pytest.mark.parametrize("case", range(9))
def test_gemms(library: Library, assert_close: Check, case: int) -> None:
    rows, (inputs, outputs) = ROWS[case], SIZES[case % len(SIZES)]
    x, weight = randn(library.dtype, rows, inputs), randn(library.dtype, outputs, inputs, seed=1)
    bias = randn(library.dtype, outputs, seed=2) if case % 2 else None
    packed = library.pack(weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(library.linear(x, packed, x.new_empty((rows, outputs))), expected)
    in_float32 = library.linear(x, packed, torch.empty((rows, outputs)))
    assert_close(in_float32, expected)


def test_a_product_of_4096_rows(library: Library, assert_close: Check) -> None:
    x, weight = randn(library.dtype, 4096, 33), randn(library.dtype, 35, 33, seed=1)
    out = library.linear(x, library.pack(weight, None), x.new_empty((4096, 35)))
    assert_close(out, x.double() @ weight.double().T)


def test_a_row_of_a_product_does_not_depend_on_its_neighbours(library: Library) -> None:
    x, weight = randn(library.dtype, 210, 300), randn(library.dtype, 48, 300, seed=1)
    packed = library.pack(weight, None)
    together = library.linear(x, packed, torch.empty((210, 48)))
    for begin, count in ((0, 1), (1, 2), (3, 4), (7, 9), (16, 20), (36, 70), (209, 1)):
        some = library.linear(x[begin : begin + count], packed, torch.empty((count, 48)))
        assert torch.equal(some, together[begin : begin + count])


def test_views_that_start_anywhere(library: Library) -> None:
    x, weight = randn(library.dtype, 9, 50), randn(library.dtype, 40, 50, seed=1)
    bias = randn(library.dtype, 40, seed=2)
    expected = library.linear(x, library.pack(weight, bias), x.new_empty((9, 40)))
    packed = library.pack(unaligned(weight), unaligned(bias))
    out = unaligned(torch.zeros_like(expected))
    assert torch.equal(library.linear(unaligned(x), packed, out), expected)
    norm = randn(library.dtype, 50, seed=3)
    expected = library.rms_norm(x, norm, 1e-5)
    assert torch.equal(library.rms_norm(unaligned(x), unaligned(norm), 1e-5), expected)
    assert torch.equal(library.silu_and_mul(unaligned(x)), library.silu_and_mul(x))


def test_a_tensor_of_another_type_or_size_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="float64"):
        library.pack(torch.zeros(16, 16, dtype=torch.float64), None)
    packed = library.pack(randn(library.dtype, 8, 4), None)
    x = randn(library.dtype, 2, 4)
    with pytest.raises(ValueError, match=r"\[2, 3\]: not \[2, 4\]"):
        library.linear(x[:, :3].contiguous(), packed, x.new_empty((2, 8)))
    with pytest.raises(ValueError, match=r"\[2, 9\]: not \[2, 8\]"):
        library.linear(x, packed, x.new_empty((2, 9)))


@pytest.mark.parametrize(("rows", "size"), [(1, 7), (1, 16), (5, 577), (70, 1024)])
def test_norms(library: Library, assert_close: Check, rows: int, size: int) -> None:
    x, residual = randn(library.dtype, rows, size), randn(library.dtype, rows, size, seed=1)
    weight = randn(library.dtype, size, seed=2)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(library.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert_close(library.add_rms_norm_(x, residual, weight, 1e-5), normed)
    assert torch.equal(residual, total)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 16), (3, 50), (40, 1536)])
def test_silu_and_mul(library: Library, assert_close: Check, rows: int, size: int) -> None:
    x = 20 * randn(library.dtype, rows, 2 * size)
    assert_close(library.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 50), (40, 1536)])
def test_gelu_and_mul(library: Library, assert_close: Check, rows: int, size: int) -> None:
    x = 4 * randn(library.dtype, rows, 2 * size)
    assert_close(library.gelu_and_mul(x), reference.gelu_and_mul(x))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_activations_keep_what_is_not_finite(library: Library, name: str) -> None:
    x = torch.zeros(1, 32, dtype=library.dtype)
    x[0, 16:] = 1
    x[0, 3], x[0, 5], x[0, 7] = math.nan, -1e4, 1e4
    out = getattr(library, name)(x)[0]
    assert out.isnan().nonzero().tolist() == [[3]]
    assert out[7] == x[0, 7]
    assert abs(float(out[5])) < 1e-30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [one.name for one in isa.available()])
def test_numbers_are_rounded_as_torch_rounds_them(name: str, dtype: torch.dtype) -> None:
    """Adds three others to each number of the dtype: subnormal, overflowing, infinite, NaN."""
    library = require(name, dtype)
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype).view(64, 1024)
    weight = torch.ones(1024, dtype=dtype)
    for distance in (1, 777, 30000):
        residual = every.flatten().roll(distance).view(64, 1024).clone()
        expected = (every.float() + residual.float()).to(dtype)
        library.add_rms_norm_(every, residual, weight, 1e-5)
        assert torch.equal(residual.isnan(), expected.isnan())
        kept = ~expected.isnan()
        assert torch.equal(residual[kept], expected[kept])
