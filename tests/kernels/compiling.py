"""Compiles kernels for sm_90 without a device, in a process of its own, where Triton compiles.

Such a process is a module that calls `report`; `lines_of` runs it and reads its answer.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HOPPER = 90
SHARED_BYTES = 227 * 1024  # that a program can have


class Compiled(NamedTuple):
    """A kernel, the bytes of shared memory of a program, and those of a thread's stack.

    A stack is what registers are spilled to; None: there is no tool that reads it from a binary.
    Products by groups of warps are counted as the kernel's text has them.
    """

    name: str
    shared: int
    stack: int | None
    group_products: int


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def report(launch: Callable[[], None]) -> None:
    """Compiles what `launch` launches, and prints a line of JSON for each kernel."""
    from kernels import compile_only  # noqa: PLC0415 - needs Triton

    found: list[compile_only.Specialization] = []
    compile_only.note_launches(HOPPER, found.append)
    launch()
    for each in found:
        compiled = each.compile()
        stack = stack_bytes(compiled.asm["cubin"])
        by_groups = compiled.asm["ptx"].count("wgmma.mma_async")
        line = Compiled(each.name, compiled.metadata.shared, stack, by_groups)
        print(json.dumps(line), flush=True)


def stack_bytes(cubin: bytes) -> int | None:
    """Bytes of a thread's stack, where registers are spilled; None: there is no such tool."""
    import triton  # noqa: PLC0415

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1])


def lines_of(module: str, cache: Path) -> list[Compiled]:
    """The lines of a module that calls `report`; Triton keeps what it compiles in this folder."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", "-m", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Compiled(*json.loads(line)) for line in done.stdout.splitlines()]
