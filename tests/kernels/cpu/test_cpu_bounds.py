"""C kernels do not access memory after the end of a tensor: a guard page follows each."""

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu import isa
from kernels.cpu.library import GemmArguments, Library, PackedLinear, Scratch
from kernels.quantized.rounding import quantized
from tests.kernels.cpu.cpu_cases import DTYPES, drawn_groups, randn, require
from tests.pace import patience

SIZES = ((1, 1, 1), (1, 577, 33), (3, 16, 70), (9, 31, 17), (33, 50, 48))
PROT_NONE, PROT_ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE


def at_the_end(x: Tensor) -> Tensor:
    """A copy that ends directly before a guard page; never freed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = x.numel() * x.element_size()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    begin = libc.mmap(None, room + mmap.PAGESIZE, PROT_ALL, flags, -1, 0)
    assert libc.mprotect(begin + room, mmap.PAGESIZE, PROT_NONE) == 0
    bytes_at_end = (ctypes.c_char * size).from_address(begin + room - size)
    return torch.frombuffer(bytes_at_end, dtype=x.dtype).view(x.shape).copy_(x)


def multiply(library: Library, rows: int, inputs: int, outputs: int) -> None:
    """A packed linear layer with every operand before a guard page."""
    dtype = library.dtype
    weight, bias = randn(dtype, outputs, inputs), randn(dtype, outputs, seed=1)
    packed = library.pack(at_the_end(weight), at_the_end(bias))
    values = at_the_end(packed.weight)
    assert packed.bias is not None
    arguments = GemmArguments(values.data_ptr(), packed.bias.data_ptr(), inputs, outputs)
    guarded = PackedLinear(values, packed.bias, arguments)
    x = at_the_end(randn(dtype, rows, inputs, seed=2))
    for out in (torch.zeros(rows, outputs), torch.zeros(rows, outputs, dtype=dtype)):
        library.linear(x, guarded, at_the_end(out))


def multiply_integers(library: Library, rows: int, bits: int, rounds_rows: bool) -> None:
    """The same with integers, in groups of 16."""
    outputs, groups = 33, 2 * bits - 5
    weight = drawn_groups((outputs, 16 * groups), bits, 16)
    if rounds_rows:
        weight = quantized(weight.dequantized(), bits, 16)
    guarded = replace(
        weight,
        integers=at_the_end(weight.integers),
        scales=at_the_end(weight.scales),
        offsets=at_the_end(weight.offsets),
    )
    packed = library.pack_groups(guarded, at_the_end(randn(library.dtype, outputs)))
    values, arguments = at_the_end(packed.weight), packed.arguments
    arguments.weight = values.data_ptr()
    x = at_the_end(randn(library.dtype, rows, 16 * groups))
    scratch = library.scratch(rows, packed)
    assert scratch.totals is not None
    guarded_scratch = Scratch(
        None if scratch.copy is None else at_the_end(scratch.copy), at_the_end(scratch.totals)
    )
    library.scratch = lambda *_: guarded_scratch  # type: ignore[method-assign]
    library.linear(
        x, PackedLinear(values, packed.bias, arguments), at_the_end(torch.zeros(rows, outputs))
    )
    del library.scratch


def run(name: str) -> None:
    """Runs every operation in every dtype; an access to a guard page kills the process."""
    for dtype in DTYPES:
        library = require(name, dtype)
        for rows, inputs, outputs in (
            (1, 1, 1),
            (1, 577, 33),
            (3, 16, 70),
            (9, 31, 17),
            (33, 50, 48),
        ):
            multiply(library, rows, inputs, outputs)
        for rows, bits in ((1, 4), (1, 8), (3, 4), (17, 8)):
            multiply_integers(library, rows, bits, False)
            multiply_integers(library, rows, bits, True)
        for size in (1, 15, 577):
            x, residual = randn(dtype, 3, size), randn(dtype, 3, size, seed=1)
            weight = at_the_end(randn(dtype, size, seed=2))
            library.add_rms_norm_(at_the_end(x), at_the_end(residual), weight, 1e-5)
            library.silu_and_mul(at_the_end(randn(dtype, 3, 2 * size)))
            library.gelu_and_mul(at_the_end(randn(dtype, 3, 2 * size)))


def run_in_forks(names: list[str]) -> None:
    """`run` in a process for each instruction set; prints how each ended."""
    for name in names:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            run(name)
            sys.stdout.flush()
            os._exit(0)
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    """The exit code by instruction set; torch is imported once for all."""
    names = [one.name for one in isa.available()]
    require(names[-1], torch.float32)
    program = f"from tests.kernels.cpu.test_cpu_bounds import run_in_forks as f; f({names!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        timeout=patience(300),
        check=True,
    )
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [one.name for one in isa.available()])
def test_nothing_is_touched_after_the_end(name: str, ended: dict[str, str]) -> None:
    require(name, torch.float32)
    assert ended[name] == "0"
