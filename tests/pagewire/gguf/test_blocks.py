"""Every type of block has the values that the `gguf` package gives it."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from pagewire.gguf import blocks
from pagewire.gguf.blocks import BITS, BY_NAME, READERS, StoredTensor, read_floats, read_groups
from pagewire.gguf.header import GgufTensor, read_header
from tests.gguf_files import GgufFile, Packed, packed, tiny_file

RAMP = (np.arange(32) - 16) / 8
GOLDEN = {  # of the ramp, with what it is read as
    "Q8_0": ("082481899199a1a9b1b9c0c8d0d8e0e8f0f8000810182028303840474f575f676f77", -1.9998779),
    "Q4_0": ("0034809191a2a2b3b3c4c4d5d5e6e6f7f7f8", -2.0),
}


def row_of(name: str, content: bytes) -> np.ndarray:
    raw = np.frombuffer(content, np.uint8)[None]
    values: np.ndarray = read_groups(raw, name).dequantized()[0]
    return values


def half(value: float) -> bytes:
    return np.array([value], "<f2").tobytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_ramp_has_the_values_that_it_was_written_with(name: str) -> None:
    content, first = GOLDEN[name]
    found = row_of(name, bytes.fromhex(content))
    assert found[0] == pytest.approx(first, abs=1e-7)
    assert np.abs(found - RAMP).max() <= (0.01 if name == "Q8_0" else 0.25)


def test_counted_bytes_have_the_sums_of_the_format() -> None:
    count = bytes(range(144))
    found = row_of("Q4_K", half(0.01) + half(0.02) + count[4:])
    assert found.astype(np.float64).sum() == pytest.approx(131.22802734375, abs=1e-9)
    assert found[0] == pytest.approx(-0.16003418, abs=1e-8)
    count = bytes(range(210))
    found = row_of("Q6_K", count[:208] + half(0.01))
    assert found.astype(np.float64).sum() == pytest.approx(132.828369140625, abs=1e-9)
    assert found[0] == 20.484375


@pytest.mark.parametrize("name", READERS)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), row_blocks=st.integers(1, 3))
def test_any_bytes_are_read_as_the_gguf_package_reads_them(
    name: str, seed: int, rows: int, row_blocks: int
) -> None:
    shape = (rows, row_blocks * BY_NAME[name].block_bytes)
    raw = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    with np.errstate(all="ignore"):  # among the scales are infinities
        found = read_groups(raw, name)
        values = found.dequantized()
        expected = dequantize(raw, GGMLQuantizationType[name])
    assert found.integers.max() < 2 ** BITS[name] and found.bits == BITS[name]
    is_finite = np.isfinite(values)
    assert np.array_equal(values[is_finite], expected[is_finite])
    # A file with such a block is refused: its offset is beyond what float32 holds.
    is_refused = not np.isfinite(found.offsets).all()
    assert is_finite.any() or is_refused or not np.isfinite(expected).any()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_numbers_are_read_as_they_are(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    tensor = packed(values, name)
    raw = tensor.stored.view(np.uint8).reshape(3, -1)
    assert np.array_equal(read_floats(raw, name), tensor.values)


@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_widening_takes_memory_for_some_rows_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "ELEMENTS_AT_ONCE", 1 << 18)
    rows, columns = 4096, 1024
    kind = BY_NAME[name]
    num_bytes = rows * columns // kind.block_size * kind.block_bytes
    path = tmp_path / "weights"
    path.write_bytes(bytes(num_bytes))
    stored = StoredTensor(path, GgufTensor("x", (rows, columns), name, 0, num_bytes))
    tracemalloc.start()
    try:
        assert sum(len(part) for part in stored.rows(0, rows)) == rows
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * blocks.ELEMENTS_AT_ONCE  # float32, and what it is made of


def test_parts_of_a_tensor_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)

    def edit(file: GgufFile) -> None:
        file.tensors["extra"] = packed(values, "Q4_1")
        file.tensors["plain"] = Packed(values, "F32")

    header = read_header(tiny_file(edit).write(tmp_path / "tiny.gguf"))
    whole = {}
    for at_once in (1 << 22, 64, 3 * 64, 1):
        monkeypatch.setattr(blocks, "ELEMENTS_AT_ONCE", at_once)
        for name in ("extra", "plain"):
            stored = StoredTensor(header.path, header.tensors[name])
            whole.setdefault(name, stored.dense())
            assert np.array_equal(stored.dense(), whole[name])
            assert np.array_equal(np.concatenate([*stored.rows(2, 6)]), whole[name][2:6])
        groups = StoredTensor(header.path, header.tensors["extra"]).groups()
        assert np.array_equal(groups.dequantized(), whole["extra"])
