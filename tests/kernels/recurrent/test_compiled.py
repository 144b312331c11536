"""The recurrent kernels compile for Hopper at sizes of released models, and fit there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 227 * 1024  # that a program can have
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
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.recurrent.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == KERNELS
    for name, shared, stack in lines:
        assert shared <= SHARED_BYTES, name
        assert (stack or 0) <= STACK_BYTES, f"{name}: {stack} bytes do not fit into registers"
