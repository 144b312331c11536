"""Kernels of attention and routers compile for Hopper at sizes of released models."""

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.compiling import SHARED_BYTES, lines_of

# Bytes of a thread's stack. Tiles of 64 pairs over latents, whose sums are half of all registers,
# keep up to 256 there with Triton 3.9, others nothing; other versions keep other registers.
STACK_BYTES, OF_LATENTS = 256, 1024
KERNELS = {
    "_choose_kernel",
    "_decode_kernel",
    "_gated_kernel",
    "_merge_kernel",
    "_norm_rope_write_kv_kernel",
    "_prefill_kernel",
    "_rotate_write_latents_kernel",
    "_row_logits_kernel",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_fit_into_shared_memory_and_registers(tmp_path: Path) -> None:
    found = lines_of("tests.kernels.attention.compiled", tmp_path)
    assert {kernel.name for kernel in found} == KERNELS
    for kernel in found:
        assert kernel.shared <= SHARED_BYTES, kernel
        most = OF_LATENTS if kernel.name in ("_decode_kernel", "_prefill_kernel") else STACK_BYTES
        assert (kernel.stack or 0) <= most, kernel
