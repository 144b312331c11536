"""Compiles the recurrent kernels for sm_90 at sizes of released models; needs no device.

Runs in a process of its own, where Triton compiles. Prints a line of JSON for each kernel: its
name, the bytes of shared memory of a program, and those that a thread keeps in memory for want of
registers, as NVIDIA's tool reads them from the binary.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels import compile_only
from kernels.recurrent.convolve import convolve
from kernels.recurrent.delta_net import update_delta_net
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.gated_norm import gated_rms_norm
from kernels.recurrent.mamba2 import update_mamba2
from kernels.recurrent.segments import Bounds, Segments
from kernels.recurrent.selective_scan import HeadParameters, ScanHeads

HOPPER = 90
ROWS, TOKENS, SEQUENCES = 40, 512, 8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def rows(states: Tensor) -> Tensor:
    """The states as a part of wider rows of memory."""
    return states.new_empty((ROWS, states.numel() + 64))[:, : states.numel()].view(
        -1, *states.shape
    )


def launch(waves: list[Segments]) -> None:
    """Every kernel, for the layers of Qwen3-Next-80B, Nemotron-3-Nano-30B and LFM2.5-1.2B."""
    delta = DeltaHeads(16, 32, 128, 128, floats(32), floats(32))
    channels, inner = 8192, 4096
    x = convolve(empty(TOKENS, channels), empty(channels, 4), None, rows(empty(channels, 3)), waves)
    y = update_delta_net(x, empty(TOKENS, 64), delta, rows(floats(32, 128, 128)), waves)
    gate = empty(TOKENS, channels + inner)[:, channels:]
    gated_rms_norm(y.flatten(1), gate, empty(128), 32, 1e-6, gate_first=False)

    numbers = HeadParameters(floats(64), floats(64))
    scan = ScanHeads(64, 64, 8, 128, numbers, floats(64))
    x = empty(TOKENS, 6144)
    y = update_mamba2(x, empty(TOKENS, 64), scan, rows(floats(64, 64, 128)), waves)
    gated_rms_norm(y, empty(TOKENS, 4096), empty(4096), 8, 1e-5, gate_first=True)

    x, states = empty(TOKENS, 3 * 2048), rows(empty(2048, 2))
    convolve(x, empty(2048, 3), None, states, waves, gated=True)


def waves() -> Iterator[Segments]:
    """Sequences of one token, and of several."""
    index = empty(SEQUENCES, dtype=torch.int64)
    segment = Segments(index, index, empty(SEQUENCES, dtype=torch.bool))
    yield segment
    number = empty(SEQUENCES, dtype=torch.int32)
    chunks = empty(TOKENS // 64 + SEQUENCES, dtype=torch.int32)
    yield Segments(index, index, segment.is_first, Bounds(number, number, chunks))


def stack_bytes(cubin: bytes) -> int | None:
    """Bytes of a thread's stack, where registers are spilled; None: there is no such tool."""
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


def main() -> None:
    found: list[compile_only.Specialization] = []
    compile_only.note_launches(HOPPER, found.append)
    for wave in waves():
        launch([wave])
    for each in found:
        compiled = each.compile()
        stack = stack_bytes(compiled.asm["cubin"])
        print(json.dumps([each.name, compiled.metadata.shared, stack]), flush=True)


if __name__ == "__main__":
    main()
