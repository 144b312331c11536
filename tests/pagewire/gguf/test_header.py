"""What is written comes back, and a damaged file is an error that names the place."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.gguf.architecture import weights
from pagewire.gguf.blocks import StoredTensor
from pagewire.gguf.files import CONTENTS, read_file
from pagewire.gguf.header import BadGguf, read_header
from tests.gguf_files import GgufFile, Packed, sentencepiece_vocabulary, tiny_file

FAR = 1 << 62


def header_bytes(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_metadata_and_tensors_come_back(tmp_path: Path) -> None:
    file = tiny_file()
    header = read_header(file.write(tmp_path / "tiny.gguf"))
    for key, value in file.metadata.items():
        found = header.metadata[key]
        found = list(found) if isinstance(found, memoryview) else found
        assert found == (np.float32(value) if isinstance(value, float) else value), key
    for name, tensor in file.tensors.items():
        stored = StoredTensor(header.path, header.tensors[name])
        assert np.array_equal(stored.dense(), tensor.values), name


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "magic": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version 50331648"),
    "version": (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 is not supported"),
    "tensors": (header_bytes(FAR, 0), f"the number of tensors, {FAR}"),
    "keys": (header_bytes(0, FAR), f"the number of keys, {FAR}"),
    "key": (header_bytes(0, 1, struct.pack("<Q", FAR) + bytes(20)), "the name of a key"),
    "long key": (
        header_bytes(0, 1, struct.pack("<Q", 1 << 17) + bytes(1 << 18)),
        "131072 bytes, more than 65536",
    ),
    "key is no text": (header_bytes(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20)), "UTF-8"),
    "type": (header_bytes(0, 1, text("a.b") + struct.pack("<I", 99) + bytes(20)), "a.b: 99"),
    "string": (
        header_bytes(0, 1, text("a.b") + struct.pack("<IQ", 8, FAR) + bytes(20)),
        f"a.b: {FAR} bytes",
    ),
    "array": (
        header_bytes(0, 1, text("a.b") + struct.pack("<IIQ", 9, 0, FAR) + bytes(20)),
        f"a.b: its length, {FAR}",
    ),
    "array of strings": (
        header_bytes(0, 1, text("a.b") + struct.pack("<IIQ", 9, 8, FAR) + bytes(20)),
        f"a.b: its length, {FAR}",
    ),
    "array of arrays": (
        header_bytes(0, 1, text("a.b") + struct.pack("<IIQ", 9, 9, 1) + bytes(20)),
        "a.b: an array of type 9",
    ),
    "key twice": (
        header_bytes(0, 2, 2 * (text("a.b") + struct.pack("<IB", 0, 1)) + bytes(20)),
        "a.b: the key is there twice",
    ),
    "alignment": (
        header_bytes(0, 1, text("general.alignment") + struct.pack("<II", 4, 0) + bytes(20)),
        "general.alignment: 0 is no power of two",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_header_is_named_without_memory_for_it(case: str, tmp_path: Path) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(BadGguf) as caught:
            read_header(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("hostile.gguf: ") and said in str(caught.value)
    assert peak_bytes < 4 << 20


def entry(sizes: list[int], kind: int, offset: int) -> bytes:
    """A tensor of the header."""
    counts = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text("x.weight") + counts + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([entry([4], 0, FAR)], "it ends at byte"),
        ([entry([1 << 40, 1 << 40], 0, 0)], "it ends at byte"),
        ([entry([4, 0], 0, 0)], r"shape \(0, 4\)"),
        ([entry([33], 8, 0)], r"shape \(33,\) is no multiple of Q8_0's 32"),
        ([entry([4], 15, 0)], "type Q8_K is not supported; supported are F32, F16, Q4_0"),
        ([entry([4], 19, 0)], "type IQ1_S is not supported"),
        ([entry([4], 34, 0)], "type TQ1_0 is not supported"),
        ([entry([4], 40, 0)], "type NVFP4 is not supported"),
        ([entry([4], 77, 0)], "type 77 is not supported"),
        ([entry([4] * 5, 0, 0)], "it has 5 dimensions"),
        ([entry([], 0, 0)], "it has 0 dimensions"),
        ([entry([4], 0, 0)] * 2, "it is there twice"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tensors: list[bytes], said: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(header_bytes(len(tensors), 0, b"".join(tensors) + bytes(256)))
    with pytest.raises(BadGguf, match=rf"^hostile\.gguf: tensor x\.weight: {said}"):
        read_header(path)


def test_a_scale_that_is_no_number_is_an_error_and_not_a_model(tmp_path: Path) -> None:
    stored = tiny_file().tensors["blk.0.ffn_down.weight"].stored.copy()
    stored[3, 34:36] = np.array([np.nan], "<f2").view(np.uint8)

    def edit(file: GgufFile) -> None:
        file.tensors["blk.0.ffn_down.weight"] = Packed(stored, "Q8_0")

    header = read_header(tiny_file(edit).write(tmp_path / "nan.gguf"))
    tensor = StoredTensor(header.path, header.tensors["blk.0.ffn_down.weight"])
    for read in (tensor.groups, tensor.dense):
        with pytest.raises(BadGguf, match=r"tensor blk\.0\.ffn_down\.weight: a scale is not"):
            read()


def read_everything(path: Path) -> None:
    """All that gateway and worker ask of a file."""
    for name in CONTENTS:
        read_file(path, name)
    header = read_header(path)
    for tensor in weights(header).values():
        StoredTensor(path, tensor).dense()


def sentencepiece(file: GgufFile) -> None:
    file.take_tokenizer(sentencepiece_vocabulary())


@pytest.fixture(scope="module", params=[lambda file: None, sentencepiece])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tiny_file(request.param).write(path).read_bytes()


def length_of_header(content: bytes) -> int:
    """The offset at which the weights begin: these may hold anything."""
    return len(content) - sum(t.stored.nbytes for t in tiny_file().tensors.values())


@settings(deadline=None, max_examples=30)
@given(place=st.integers(0, 1 << 20))
def test_a_file_cut_off_anywhere_is_refused(
    place: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(whole[: place % (len(whole) - 63)])
    with pytest.raises(BadGguf, match=r"^cut\.gguf: "):
        read_everything(path)


def values_of(size: int) -> st.SearchStrategy[tuple[int, int]]:
    """A number of bytes and what they hold: mostly what a reader stumbles over."""
    edges = st.sampled_from((0, 1, 255, 2 ** (8 * size - 1), 2 ** (8 * size) - 1))
    return st.tuples(st.just(size), st.one_of(edges, st.integers(0, 2 ** (8 * size) - 1)))


PLACES = st.integers(0, 1 << 20)  # of the header, modulo its length
CHANGES = st.tuples(PLACES, st.one_of(values_of(1), values_of(4), values_of(8)))


@settings(deadline=None, max_examples=100)
@given(changes=st.lists(CHANGES, min_size=1, max_size=4))
def test_a_changed_header_is_read_or_refused_and_nothing_else(
    changes: list[tuple[int, tuple[int, int]]],
    whole: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    changed = bytearray(whole)
    for place, (size, value) in changes:
        begin = place % (length_of_header(whole) - 7)
        changed[begin : begin + size] = value.to_bytes(size, "little")
    path = tmp_path_factory.mktemp("changed") / "changed.gguf"
    path.write_bytes(changed)
    try:
        read_everything(path)
    except BadGguf as error:
        assert str(error).startswith("changed.gguf: ")
