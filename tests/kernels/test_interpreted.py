"""The interpreter that leaves out work still computes what Triton's types say."""

import math
import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="nothing is interpreted"
)


@triton.jit
def _operations_kernel(small_ptr, whole_ptr, half_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    small, whole, half = (tl.load(ptr + at) for ptr in (small_ptr, whole_ptr, half_ptr))
    tl.store(out_ptr + at, small + small)  # in 8 bits
    tl.store(out_ptr + SIZE + at, small + whole)  # in 32
    tl.store(out_ptr + 2 * SIZE + at, whole / 2)  # of integers, and no integer
    tl.store(out_ptr + 3 * SIZE + at, half * 0.3)  # in 16 bits
    tl.store(out_ptr + 4 * SIZE + at, half * -0.0)
    tl.store(out_ptr + 5 * SIZE + at, half * 0.0)
    tl.store(out_ptr + 6 * SIZE + at, whole * True + (whole[:, None] + whole[None, :]).sum(1))
    tl.store(out_ptr + 7 * SIZE + at, 3 - whole // 2 + whole % 2)
    tl.store(out_ptr + 8 * SIZE + at, (whole > 2) + (whole > 2))  # bits: 1 + 1 is 0
    tl.store(out_ptr + 9 * SIZE + at, half.to(tl.float32) * 0.3)  # in 32 bits


@triton.jit
def _below_zero_kernel(ptr):
    tl.store(ptr, tl.load(ptr) + -1)


def test_types_of_results_and_the_sign_of_zero() -> None:
    small = torch.tensor([200, 100, 1, 255], dtype=torch.uint8)
    whole = torch.tensor([1, 2, 3, 2**24 + 1], dtype=torch.int32)
    half = torch.tensor([1.0, -2.0, 1000.0, 0.1], dtype=torch.float16)
    out = torch.empty(10, 4)
    for _ in range(2):  # again, with what it keeps
        _operations_kernel[(1,)](small, whole, half, out, 4)
        assert out[0].tolist() == [144, 200, 2, 254]
        assert out[1].tolist() == (small + whole).float().tolist()
        assert out[2].tolist() == (whole / 2).tolist()
        assert out[3].tolist() == (half * 0.3).float().tolist()
        signs = [math.copysign(1, number) for number in out[4:6].flatten().tolist()]
        assert signs == [-1, 1, -1, -1, 1, -1, 1, 1]
        assert out[6].tolist() == (5 * whole.long() + whole.sum()).float().tolist()
        assert out[7].tolist() == (3 - whole // 2 + whole % 2).float().tolist()
        assert out[8].tolist() == [0, 0, 0, 0]
        assert out[9].tolist() == (half.float() * 0.3).tolist()


def test_a_number_that_a_type_does_not_hold_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(InterpreterError, match="unsigned tensor and a negative scalar"):
            _below_zero_kernel[(1,)](torch.ones(1, dtype=torch.uint8))
