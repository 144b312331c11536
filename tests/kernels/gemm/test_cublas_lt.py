"""The library's GEMMs by each of its algorithms, against torch in float64."""

from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gemm import cublas_lt
from kernels.gemm.cublas_lt import CublasError, CublasLt, GemmKind, GemmShape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KINDS = [
    GemmKind(n, k, dtype, adds)
    for n, k, dtype, adds in (
        (6144, 4096, torch.bfloat16, False),
        (4096, 4096, torch.bfloat16, True),
        (1024, 12288, torch.bfloat16, True),
        (1000, 520, torch.float16, False),
        (72, 64, torch.float16, True),
    )
]
MAPS = """\
7f00-7f01 r--p 00000000 103:02 8 /usr/lib/libc.so.6
7f02-7f03 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00001000 103:02 9 /a folder/libcublasLt.so.13
7f06-7f07 r--p 00002000 103:02 9 /a folder/libcublasLt.so.13
"""


@pytest.fixture
def library() -> CublasLt:
    found = cublas_lt.open_on(CUDA)
    assert found is not None
    return found


def make(shape: GemmShape) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a weight, and the previous content of the output."""
    kind, generator = shape.kind, torch.Generator(CUDA).manual_seed(shape.rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=CUDA, generator=generator).to(kind.dtype)

    return normal(shape.rows, kind.k), normal(kind.n, kind.k), normal(shape.rows, kind.n)


def expected(x: Tensor, weight: Tensor, out: Tensor, adds: bool) -> Tensor:
    expected = x.double() @ weight.double().T
    return expected + out.double() if adds else expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [2, 17, 40, 192, 1000])
def test_every_candidate_is_the_product(
    library: CublasLt, rows: int, kind: GemmKind, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    shape = GemmShape(rows, kind)
    x, weight, held = make(shape)
    want = expected(x, weight, held, kind.adds)
    candidates = library.candidates(shape)
    assert len(set(candidates)) == len(candidates) > 0
    for algorithm in candidates:
        out = held.clone()
        assert library.gemm(shape, algorithm)(x, weight, out) is out
        assert_close(out, want)


@pytest.mark.gpu
def test_a_graph_multiplies_whatever_its_tensors_hold_when_it_is_replayed(
    library: CublasLt, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    shape = GemmShape(40, KINDS[1])
    x, weight, out = make(shape)
    gemms = [library.gemm(shape, algorithm) for algorithm in library.candidates(shape)]
    for gemm in gemms:
        gemm(x, weight, out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for gemm in gemms:
            gemm(x, weight, out)
        graph.capture_end()
    torch.cuda.synchronize()
    x.normal_()
    out.zero_()
    graph.replay()
    assert_close(out, len(gemms) * (x.double() @ weight.double().T))


@pytest.mark.gpu
def test_an_algorithm_is_known_again_by_its_bytes(library: CublasLt) -> None:
    shape = GemmShape(40, KINDS[0])
    x, weight, out = make(shape)
    (algorithm, *_) = library.candidates(shape)
    again = cublas_lt.open_on(CUDA)
    assert again is not None
    first = library.gemm(shape, algorithm)(x, weight, out).clone()
    assert torch.equal(again.gemm(shape, algorithm)(x, weight, out), first)
    with pytest.raises(CublasError, match="cublasLtMatmulAlgoCheck: CUBLAS_STATUS_"):
        library.gemm(shape, b"\xff" * 64)
    with pytest.raises(CublasError, match="an algorithm of 63 bytes, not 64"):
        library.gemm(shape, algorithm[:63])


@pytest.mark.gpu
def test_tensors_that_are_not_of_the_shape_are_refused_by_name(library: CublasLt) -> None:
    shape = GemmShape(16, GemmKind(128, 64, torch.bfloat16, adds=False))
    gemm = library.gemm(shape, library.candidates(shape)[0])
    x, weight, out = make(shape)
    with pytest.raises(ValueError, match=r"x must be contiguous torch.bfloat16 \(16, 64\), got"):
        gemm(x[:8], weight, out)
    with pytest.raises(ValueError, match=r"weight must be .* with strides \(1, 128\)"):
        gemm(x, weight.T.contiguous().T, out)
    with pytest.raises(ValueError, match=r"out must be .* got torch.float32"):
        gemm(x, weight, out.float())
    apart = torch.empty(16 * 64 + 8, dtype=x.dtype, device=CUDA)[8:].view(16, 64)
    with pytest.raises(ValueError, match="x must be aligned to 256 bytes"):
        gemm(apart, weight, out)


@pytest.mark.gpu
def test_a_product_keeps_none_of_its_tensors(library: CublasLt) -> None:
    shape = GemmShape(1000, KINDS[0])
    gemm = library.gemm(shape, library.candidates(shape)[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gemm(*make(shape))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_the_library_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert cublas_lt._loaded_path(maps) == "/a folder/libcublasLt.so.13"
    maps.write_text(MAPS.replace("cublasLt", "hipblaslt"))
    assert cublas_lt._loaded_path(maps) is None
    assert cublas_lt._loaded_path(tmp_path / "none") is None


def test_there_is_none_on_a_cpu_and_none_for_float32() -> None:
    assert cublas_lt.open_on(CPU) is None
    assert not cublas_lt.serves(torch.float32)
    assert cublas_lt.serves(torch.bfloat16)
    assert cublas_lt.serves(torch.float16)


class Failing:
    """A fake library with calls that return a given status."""

    class Function:
        restype: Any = None

        def __init__(self, answer: Any) -> None:
            self._answer = answer

        def __call__(self, *arguments: Any) -> Any:
            return self._answer

    def __init__(self) -> None:
        self.cublasLtGetVersion = self.Function(130100)
        self.cublasLtGetStatusName = self.Function(b"CUBLAS_STATUS_NOT_INITIALIZED")
        self.cublasLtCreate = self.Function(1)


def test_a_status_is_an_error_with_the_name_of_the_call() -> None:
    library: CDLL = Failing()  # type: ignore[assignment]
    with pytest.raises(CublasError, match=r"^cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED \(1\)$"):
        CublasLt(library, CPU)
