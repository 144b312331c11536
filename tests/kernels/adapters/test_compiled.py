"""Kernels of adapters compile for Hopper, for few rows and many, and every rank."""

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.compiling import SHARED_BYTES, lines_of

STACK_BYTES = 256  # of a thread; they keep 72 at most with Triton 3.6
KERNELS = {"_adapters_kernel", "_expand_kernel", "_group_kernel", "_shrink_kernel"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_fit_into_shared_memory_and_registers(tmp_path: Path) -> None:
    found = lines_of("tests.kernels.adapters.compiled", tmp_path)
    assert {kernel.name for kernel in found} == KERNELS
    for kernel in found:
        assert kernel.shared <= SHARED_BYTES, kernel
        assert (kernel.stack or 0) <= STACK_BYTES, kernel
