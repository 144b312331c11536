"""The C kernels mean what their references say; without a compiler there are none, and no error."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import SOURCE, AttentionArguments, Library, load

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK_SIZE = 16
Check = Callable[[Tensor, Tensor], None]


@pytest.fixture(params=DTYPES, ids=str)
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    if found is None:
        pytest.skip("no C compiler")
    return found


def randn(library: Library, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(library.dtype)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (48, 80), (576, 96)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(
    library: Library, assert_close: Check, rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    x, weight = randn(library, rows, inputs), randn(library, outputs, inputs, seed=1)
    bias = randn(library, outputs, seed=2) if has_bias else None
    packed = library.pack(weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(library.linear(x, packed, x.new_empty((rows, outputs))), expected)
    exact = library.linear(x, packed, torch.empty((rows, outputs)))
    assert_close(exact, expected)


def test_a_row_of_a_product_does_not_depend_on_its_neighbours(library: Library) -> None:
    x, weight = randn(library, 19, 64), randn(library, 48, 64, seed=1)
    packed = library.pack(weight, None)
    together = library.linear(x, packed, x.new_empty((19, 48)))
    for row in range(19):
        alone = library.linear(x[row : row + 1], packed, x.new_empty((1, 48)))
        assert torch.equal(alone[0], together[row])


def test_a_product_of_another_type_or_size_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="float64"):
        library.pack(torch.zeros(16, 16, dtype=torch.float64), None)


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 576), (70, 1024)])
def test_norms(library: Library, assert_close: Check, rows: int, size: int) -> None:
    x, residual = randn(library, rows, size), randn(library, rows, size, seed=1)
    weight = randn(library, size, seed=2)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(library.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert_close(library.add_rms_norm_(x, residual, weight, 1e-5), normed)
    assert torch.equal(residual, total)


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 48), (40, 1536)])
def test_silu_and_mul(library: Library, assert_close: Check, rows: int, size: int) -> None:
    x = 20 * randn(library, rows, 2 * size)
    assert_close(library.silu_and_mul(x), reference.silu_and_mul(x))


def test_silu_keeps_what_is_not_finite(library: Library) -> None:
    x = torch.zeros(1, 32, dtype=library.dtype)
    x[0, 16:] = 1
    x[0, 3], x[0, 5], x[0, 7] = math.nan, -1e4, 1e4
    out = library.silu_and_mul(x)[0]
    assert out.isnan().nonzero().tolist() == [[3]]
    assert out[7] == x[0, 7]
    assert abs(float(out[5])) < 1e-30


def attend(
    library: Library, contexts: list[int], heads: tuple[int, int, int], *, has_norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, expected, cache, expected cache) of a decode step over shuffled blocks."""
    num_heads, num_kv, dim = heads
    widths = [-(-context // BLOCK_SIZE) for context in contexts]
    ids = (torch.randperm(sum(widths), generator=torch.Generator().manual_seed(1)) + 1).int()
    tables = torch.zeros(len(contexts), max(widths) + 1, dtype=torch.int32)
    for row, blocks in zip(tables, ids.split(widths), strict=True):
        row[: len(blocks)] = blocks
    lens = torch.tensor(contexts, dtype=torch.int32)
    positions = (lens - 1).long()
    slots = tables.gather(1, (positions // BLOCK_SIZE)[:, None]).squeeze(1).long() * BLOCK_SIZE
    slots += positions % BLOCK_SIZE
    cache = randn(library, (sum(widths) + 1) * BLOCK_SIZE, 2, num_kv, dim, seed=2)
    qkv = randn(library, len(contexts), (num_heads + 2 * num_kv) * dim, seed=3)
    angles = torch.arange(max(contexts))[:, None] / 10 ** torch.linspace(0, 3, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    qk_norm = randn(library, num_heads + num_kv, dim, seed=4) if has_norm else None

    qk, v = qkv.view(len(contexts), -1, dim).split((num_heads + num_kv, num_kv), 1)
    if qk_norm is not None:
        qk = reference.rms_norm(qk, qk_norm, 1e-5)
    q, k = reference.rotary_embedding(*qk.split((num_heads, num_kv), 1), positions, cos_sin)
    expected_cache = cache.clone()
    k_cache, v_cache = expected_cache.view(-1, BLOCK_SIZE, 2, num_kv, dim).unbind(2)
    expected_cache[slots, 0], expected_cache[slots, 1] = k, v
    expected = reference.paged_decode_attention(q, k_cache, v_cache, tables, lens, dim**-0.5)

    starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    arguments = AttentionArguments(
        num_heads, num_kv, dim, BLOCK_SIZE, tables.shape[1], dim**-0.5, 1e-5, cos_sin.data_ptr(),
        positions.data_ptr(), slots.data_ptr(), tables.data_ptr(), lens.data_ptr(),
        starts.data_ptr(), len(contexts), len(contexts),
    )  # fmt: skip
    out = qkv.new_empty((len(contexts), num_heads * dim))
    library.attend(arguments, qkv, qk_norm, cache, out)
    return out, expected.flatten(1), cache, expected_cache


@pytest.mark.parametrize("share", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("has_norm", [False, True])
def test_decode_attention(library: Library, share: int, dim: int, has_norm: bool) -> None:
    contexts = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 33, 500]
    heads = (3 * share, 3, dim)
    out, expected, cache, expected_cache = attend(library, contexts, heads, has_norm=has_norm)
    # The reference rounds queries and angles to the type first; the kernel keeps them in float32.
    bound = 3e-6 if library.dtype == torch.float32 else 2e-2
    for actual, wanted in ((out, expected), (cache, expected_cache)):
        distance = (actual.double() - wanted.double()).norm()
        assert distance <= bound * wanted.double().norm()


def test_switched_off_or_without_a_type_there_is_no_library() -> None:
    assert load(torch.float32, {"PAGEWIRE_CPU_KERNELS": "0"}) is None
    assert load(torch.float64, {}) is None


def test_without_a_compiler_there_is_no_library(tmp_path: Path) -> None:
    assert load(torch.float32, {"PATH": str(tmp_path), "PAGEWIRE_CACHE": str(tmp_path)}) is None
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no luck >&2\nexit 1\n')
    broken.chmod(0o755)
    cache = tmp_path / "cache"
    environment = {"CC": str(broken), "PATH": "/bin:/usr/bin", "PAGEWIRE_CACHE": str(cache)}
    assert load(torch.float32, environment) is None
    assert list((cache / "kernels").iterdir()) == []
    with pytest.raises(build.BuildFailed, match="no luck"):
        build.library(SOURCE, [], build.Toolchain.find(environment))


@pytest.mark.parametrize("library", [torch.float32], indirect=True)
def test_another_source_type_or_compiler_is_another_library(
    library: Library, tmp_path: Path
) -> None:
    toolchain = replace(build.Toolchain.find({"PATH": "/bin:/usr/bin"}), cache=tmp_path)
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return X; }\n")
    first = build.library(source, ["-DX=1"], toolchain)
    assert build.library(source, ["-DX=1"], toolchain) == first
    assert build.library(source, ["-DX=2"], toolchain) != first
    source.write_text("int two(void) { return X; }\n")
    assert build.library(source, ["-DX=1"], toolchain) != first


@pytest.mark.parametrize("library", [torch.float32], indirect=True)
def test_processes_that_build_at_once_all_get_the_library(library: Library, tmp_path: Path) -> None:
    program = (
        "import torch; from kernels.cpu.library import load; assert load(torch.float32) is not None"
    )
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PAGEWIRE_CACHE": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]
