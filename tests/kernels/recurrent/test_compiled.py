"""The recurrent kernels compile for Hopper at sizes of released models, and fit there."""

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.compiling import SHARED_BYTES, lines_of

STACK_BYTES = 256  # of a thread; none with Triton 3.9, and other versions keep other registers
KERNELS = {
    "_convolve_kernel",
    "_step_kernel",
    "_prepare_kernel",
    "_follow_kernel",
    "_scan_step_kernel",
    "_scan_chunks_kernel",
    "_gated_norm_kernel",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_fit_into_shared_memory_and_registers(tmp_path: Path) -> None:
    found = lines_of("tests.kernels.recurrent.compiled", tmp_path)
    assert {kernel.name for kernel in found} == KERNELS
    for kernel in found:
        assert kernel.shared <= SHARED_BYTES, kernel
        assert (kernel.stack or 0) <= STACK_BYTES, kernel
        if kernel.name == "_follow_kernel":  # see `scan_chunks`
            assert not kernel.group_products
