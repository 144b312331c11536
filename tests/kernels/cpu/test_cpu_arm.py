"""C kernels on ARM, cross-compiled and emulated.

Needs the Debian packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
"""

import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind
from kernels.cpu import build, isa
from kernels.cpu.library import ATTENTION, SOURCE, STORED
from kernels.expert_clamp import Clamp
from tests.kernels.cpu.cpu_cases import (
    DTYPES,
    drawn_groups,
    randn,
    whole_numbers,
    whole_weight,
)
from tests.pace import patience
from tests.worker_svc.mxfp4_checkpoints import meaning, random_codes
from worker_svc.quantization.mxfp4 import rearranged, separated

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
HARNESS = Path(__file__).with_name("harness.c")
LINEAR, NORM, SILU, ATTEND, FOUR_BITS, EIGHT_BITS, FOUR_BY_EIGHT, EIGHT_BY_EIGHT = range(8)
MXFP4, EXPERTS = 8, 9
BOUNDS = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Check = Callable[[Tensor, Tensor], None]

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"needs {COMPILER} and {EMULATOR}",
)


@dataclass(frozen=True, slots=True)
class Emulated:
    """The kernels for one dtype on the emulated machine."""

    program: Path
    dtype: torch.dtype
    folder: Path

    def __call__(
        self,
        operation: int,
        rows: int,
        a: int,
        b: int,
        *operands: Tensor,
        window: int = 0,
        softcap: float = 0,
    ) -> Tensor:
        """Runs an operation on its operands; returns the flat output."""
        source, result = self.folder / "operands", self.folder / "result"
        contents = [x.contiguous().view(torch.uint8).numpy().tobytes() for x in operands]
        head = struct.pack("<5qf", operation, rows, a, b, window, softcap)
        source.write_bytes(head + b"".join(contents))
        command = [EMULATOR, str(self.program), str(source), str(result)]
        subprocess.run(command, check=True, timeout=patience(300))
        return torch.frombuffer(bytearray(result.read_bytes()), dtype=self.dtype)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=["neon", "plain"])
def run(
    request: pytest.FixtureRequest,
    dtype: torch.dtype,
    tmp_path: Path,
    programs: Callable[[str, torch.dtype], Path],
) -> Emulated:
    return Emulated(programs(request.param, dtype), dtype, tmp_path)


@pytest.fixture(scope="module")
def programs() -> Callable[[str, torch.dtype], Path]:
    """The harness for an instruction set and a dtype, compiled once per machine like libraries."""
    cache = build.cache_folder(os.environ) / "harness"
    cache.mkdir(parents=True, exist_ok=True)
    toolchain = build.Toolchain(COMPILER, HARNESS, cache)  # which links no OpenMP runtime

    @functools.cache
    def compiled(name: str, dtype: torch.dtype) -> Path:
        (own,) = (one.flags for one in isa.ISAS if one.name == name)
        flags = (*own, STORED[dtype], "-static")
        # Of all that is compiled: the kernels' sources and headers, and the harness.
        sources = (SOURCE, ATTENTION, HARNESS)
        keys = [build._key(source, flags, toolchain) for source in sources]
        path = cache / "-".join(keys)
        if not path.exists():
            made = cache / f".build-{os.getpid()}"
            done = subprocess.run(
                [
                    COMPILER, *build.FLAGS, *flags, f"-I{SOURCE.parent}", str(HARNESS), "-lm",
                    "-o", str(made),
                ],
                check=False, timeout=patience(300), capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            made.rename(path)
        return path

    return compiled


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 577, 33), (3, 48, 80), (8, 31, 17), (40, 300, 34)]
)
def test_gemms(run: Emulated, assert_close: Check, rows: int, inputs: int, outputs: int) -> None:
    dtype = run.dtype
    x, weight = randn(dtype, rows, inputs), randn(dtype, outputs, inputs, seed=1)
    out = run(LINEAR, rows, inputs, outputs, x, weight).view(rows, outputs)
    assert_close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 80, 33), (2, 16, 1), (13, 304, 34)])
def test_gemms_of_integers(
    run: Emulated, assert_close: Check, rows: int, inputs: int, outputs: int, bits: int
) -> None:
    weight = drawn_groups((outputs, inputs), bits, 16)
    operation, stored = (FOUR_BITS, torch.float16) if bits == 4 else (EIGHT_BITS, torch.float32)
    x = randn(run.dtype, rows, inputs)
    scales, offsets = weight.scales.to(stored), weight.offsets.to(stored)
    out = run(operation, rows, inputs, outputs, x, weight.integers, scales, offsets)
    assert_close(out.view(rows, outputs), x.double() @ weight.dequantized().double().T)


@pytest.mark.parametrize("run", ["dotprod", "neon", "plain"], indirect=True)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 13])
def test_gemms_of_integers_and_rounded_rows(run: Emulated, rows: int, bits: int) -> None:
    x, weight = whole_numbers(run.dtype, rows, 80, 16), whole_weight((33, 80), bits, 16)
    zeros = weight.zeros()
    assert zeros is not None
    operation = FOUR_BY_EIGHT if bits == 4 else EIGHT_BY_EIGHT
    scales = weight.scales.to(torch.float16 if bits == 4 else torch.float32)
    out = run(operation, rows, 80, 33, x, weight.integers, scales, zeros).view(rows, 33)
    assert torch.equal(out, (x.double() @ weight.dequantized().double().T).to(run.dtype))


@pytest.mark.parametrize("rows", [1, 13])
def test_gemms_of_mxfp4(run: Emulated, assert_close: Check, rows: int) -> None:
    blocks, scales = random_codes((1, 34, 96), 3)
    codes = separated(rearranged(blocks[0], scales[0]))
    # Groups of 16 inputs, two of which have one scale.
    halves = (2.0 ** (scales[0].float() - 127)).half().repeat_interleave(2, 1)
    x = randn(run.dtype, rows, 96)
    out = run(MXFP4, rows, 96, 34, x, codes, halves, torch.zeros_like(halves)).view(rows, 34)
    assert_close(out, x.double() @ meaning(blocks[0], scales[0]).double().T)


@pytest.mark.parametrize("rows", [1, 40])
def test_experts(run: Emulated, rows: int) -> None:
    hidden, inner = 50, 33
    x, logits = randn(run.dtype, rows, hidden), randn(torch.float32, rows, 4, seed=1)
    weights, chosen = reference.choose_experts(logits, 2, renormalizes=True)
    gate_ups = (randn(torch.float32, 4, 2 * inner, hidden, seed=2) / hidden**0.5).to(run.dtype)
    downs = (randn(torch.float32, 4, hidden, inner, seed=3) / inner**0.5).to(run.dtype)
    out = run(EXPERTS, rows, hidden, inner, x, weights, chosen, gate_ups, downs)
    by_reference = [[partial(F.linear, weight=w.double()) for w in of] for of in (gate_ups, downs)]
    act = partial(reference.clamped_and_mul, clamp=Clamp(0.7, 1.702))
    wanted = reference.feed_experts(x.double(), weights, chosen, *by_reference, act)
    assert (out.view(rows, hidden).double() - wanted).norm() <= BOUNDS[run.dtype] * wanted.norm()


def test_norm_and_activation(run: Emulated, assert_close: Check) -> None:
    dtype = run.dtype
    x, residual = randn(dtype, 3, 77), randn(dtype, 3, 77, seed=1)
    weight = randn(dtype, 77, seed=2)
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(run(NORM, 3, 77, 0, x, residual, weight.float()).view(3, 77), expected)
    x = 20 * randn(dtype, 3, 2 * 77)
    assert_close(run(SILU, 3, 77, 0, x).view(3, 77), reference.silu_and_mul(x))


@pytest.mark.parametrize(
    ("rows", "num_kv", "dim", "window", "softcap"),
    [
        (1, 2, 64, 0, 0.0),
        (70, 1, 64, 0, 2.0),
        (9, 2, 20, 0, 0.0),
        (70, 1, 64, 19, 0.0),
        (9, 2, 20, 1, 0.5),
    ],
)
def test_attention(
    run: Emulated, rows: int, num_kv: int, dim: int, window: int, softcap: float
) -> None:
    dtype = run.dtype
    qkv = randn(dtype, rows, 5 * num_kv * dim)
    angles = torch.arange(rows)[:, None] / 10 ** torch.linspace(0, 3, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    sinks = randn(torch.float32, 3 * num_kv, seed=1)
    operands = qkv, cos_sin, sinks
    out = run(ATTEND, rows, num_kv, dim, *operands, window=window, softcap=softcap)
    out = out.view(rows, -1)
    q, k, v = qkv.view(rows, -1, dim).split((3 * num_kv, num_kv, num_kv), 1)
    q, k = reference.rotary_embedding(q, k, torch.arange(rows), cos_sin)
    k_cache, v_cache = torch.zeros(2, -(-rows // 16), 16, num_kv, dim, dtype=dtype)
    k_cache.flatten(0, 1)[:rows], v_cache.flatten(0, 1)[:rows] = k, v
    table = torch.arange(len(k_cache), dtype=torch.int32)[None]
    ends = torch.tensor([0, rows], dtype=torch.int32)
    kind = AttentionKind(dim**-0.5, window or None, softcap=softcap or None, has_sinks=True)
    expected = reference.paged_attention(
        q, k_cache, v_cache, table, ends[1:], ends, rows, kind, sinks=sinks
    ).flatten(1)
    distance = (out.double() - expected.double()).norm()
    assert distance <= BOUNDS[dtype] * expected.double().norm()
