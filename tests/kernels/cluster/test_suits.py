"""Weights and caches that the kernels in CUDA C take; their results are tested on a GPU."""

import ctypes
import re

import pytest
import torch

from kernels.cluster import (
    decode_float8,
    decode_float8_rows,
    expert_rows,
    float8_cache,
    narrow_rows,
)
from kernels.cluster.float8_cache import Float8Cache
from kernels.cluster.program import CannotCompile, Kernel, Launch
from kernels.cluster.tensor_map import TensorMap
from kernels.quantized import rounding
from kernels.quantized.narrow import NarrowWeight
from kernels.quantized.scaled import ScaledWeight
from scheduler_svc.speculation.options import MAX_DRAFTED


def weight(bits: int, group: int, shape: tuple[int, int] = (32, 256)) -> NarrowWeight:
    plain = torch.randn(shape)
    stored = ScaledWeight.rounded(plain) if bits == 0 else rounding.quantized(plain, bits, group)
    found = NarrowWeight.of(stored.regrouped(group) if isinstance(stored, ScaledWeight) else stored)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("bits", "group"), [(0, 256), (0, 128), (0, 64), (4, 32), (4, 128), (8, 16)]
)
def test_groups_of_a_word_of_all_lanes_and_more_suit(bits: int, group: int) -> None:
    assert narrow_rows.suits(weight(bits, group), gated=True)


def test_other_sizes_do_not() -> None:
    assert not narrow_rows.suits(weight(4, 32, (24, 256)))  # outputs
    assert narrow_rows.suits(weight(4, 32, (48, 256)))
    assert not narrow_rows.suits(weight(4, 32, (48, 256)), gated=True)  # halves of 24
    assert not narrow_rows.suits(weight(4, 32, (32, 64)))  # 32 bytes a row
    assert not narrow_rows.suits(weight(0, 32))  # floats lie in their order, a group in two lanes
    assert narrow_rows.kernels_for(weight(4, 32), torch.bfloat16) is None  # not on a GPU


@pytest.mark.parametrize(
    ("changed", "is_suited"),
    [
        ({}, True),
        ({"block_size": 64}, True),
        ({"kv_dtype": torch.float8_e5m2}, True),
        ({"kv_dtype": torch.bfloat16}, False),
        ({"dtype": torch.float16}, False),
        ({"head_dim": 64}, False),
        ({"block_size": 8}, False),
        ({"block_size": 48}, False),
        ({"num_heads": 27}, False),
    ],
)
def test_caches_that_suit(changed: dict, is_suited: bool) -> None:
    given = {
        "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "head_dim": 128,
        "block_size": 16, "num_heads": 24,
    } | changed  # fmt: skip
    q = torch.empty((2, given["num_heads"], given["head_dim"]), dtype=given["dtype"])
    shape = (4, given["block_size"], 3, given["head_dim"])
    assert decode_float8.suits(q, torch.empty(shape, dtype=given["kv_dtype"])) is is_suited
    cache = torch.empty(shape, dtype=given["kv_dtype"])
    assert decode_float8.kernel_for(q, cache) is None  # not on a GPU
    assert decode_float8_rows.kernels_for(q.flatten(1), cache, True, 4096) is None


@pytest.mark.parametrize(
    ("file", "struct", "given"),
    [
        ("narrow.cuh", "Layer", narrow_rows._Layer),
        ("float8_tiles.cuh", "Float8Cache", Float8Cache),
        ("decode_float8.cu", "Attention", decode_float8._Attention),
        ("decode_float8_rows.cu", "Rows", decode_float8_rows._Rows),
        ("expert_rows.cu", "Product", expert_rows._Product),
    ],
)
def test_arguments_are_those_of_the_sources(
    file: str, struct: str, given: type[ctypes.Structure]
) -> None:
    source = decode_float8.SOURCE.with_name(file).read_text()
    body = re.search(rf"struct {struct} {{(.*?)\n}};", source, re.S)
    assert body is not None
    lines = [line.split("//")[0] for line in body[1].splitlines()]
    declared = " ".join(lines).replace("*", " ").split(";")
    words = {"const", "void", "u16", "u32", "unsigned", "char", "float", "float4", "int", "i64"}
    words |= {"Float8Cache", "TensorMap"}
    names = [
        name.strip()
        for part in declared
        for name in " ".join(w for w in part.split() if w not in words).split(",")
        if name.strip()
    ]
    assert names == [field[0] for field in given._fields_]


def test_a_launch_with_tensor_maps_is_as_large_as_the_device_takes_it_to_be() -> None:
    assert ctypes.sizeof(TensorMap) == 128
    assert ctypes.sizeof(decode_float8._Attention) % 64 == 0  # what they are aligned to


def formula(name: str) -> str:
    """A function of the source that returns a value, in Python's words."""
    source = decode_float8.SOURCE.read_text()
    body = re.search(rf"int {name}\(.*?\) {{\n    return (.*);\n}}", source)
    assert body is not None
    return body[1].replace("/", "//")


def test_lanes_that_read_at_once_meet_no_bank_twice() -> None:
    """With the source's order of tokens and of their 16-byte pieces."""
    of_row, of_piece = formula("token_of"), formula("place_of")

    def token_of(row: int) -> int:
        return int(eval(of_row, {"row": row}))

    def bank_of(token: int, piece: int) -> int:
        place = eval(of_piece, {"token": token, "piece": piece, "DIMS": float8_cache.DIMS})
        return place // 16 % 8

    assert sorted(map(token_of, range(8))) == list(range(8))
    for lanes in (range(i, i + 8) for i in range(0, 32, 8)):
        places = [(lane // 4, lane % 4) for lane in lanes]
        for half in (0, 4):
            assert len({bank_of(token_of(g), half + t) for g, t in places}) == 8
        for odd in (0, 1):
            assert len({bank_of(token_of(2 * t + odd), g) for g, t in places}) == 8


@pytest.mark.parametrize(
    ("pairs", "largest", "blocks"),
    [
        (1, 16, 16), (8, 16, 16), (8, 8, 8), (9, 16, 8), (64, 16, 2), (128, 16, 2), (133, 16, 1),
        (512, 16, 1),
    ],
)  # fmt: skip
def test_few_rows_share_the_chip(pairs: int, largest: int, blocks: int) -> None:
    assert decode_float8_rows.cluster_for(pairs, 132, largest) == blocks


@pytest.mark.parametrize("num_kv_heads", range(1, 33))
def test_blocks_of_many_rows_share_all_heads_out_and_fit(num_kv_heads: int) -> None:
    shape = decode_float8.block_shape(num_kv_heads)
    assert num_kv_heads % shape.kv_heads == 0
    assert 1 <= shape.warps <= 8 < shape.warps + shape.kv_heads  # one span more would be too much
    assert shape.stages >= 4
    most = shape.shared_bytes + (2 * decode_float8.MOST_UNITS + 1) * 4
    assert most <= 227 << 10  # of a multiprocessor's shared memory
    fewest = -(-256 // num_kv_heads)
    assert decode_float8.pays(fewest, num_kv_heads)
    assert not decode_float8.pays(fewest - 1, num_kv_heads)
    assert not decode_float8.pays(decode_float8.MOST_UNITS + 1, num_kv_heads)


class Small:
    """A program on a device without the shared memory of its kernel."""

    def __init__(self, *_: object) -> None:
        pass

    def kernel(self, name: str, launch: Launch) -> Kernel:
        assert launch.shared_bytes > 99 << 10  # what some devices have
        raise CannotCompile(f"{name}: no such launch")


def test_a_device_without_the_shared_memory_keeps_the_slower_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_float8, "can_run_on", lambda _: True)
    monkeypatch.setattr(decode_float8, "num_processors", lambda: 132)
    monkeypatch.setattr(decode_float8, "Program", Small)
    decode_float8._compiled.cache_clear()
    q = torch.empty((64, 32, 128), dtype=torch.bfloat16)
    cache = torch.empty((4, 16, 8, 128), dtype=torch.float8_e4m3fn)
    assert decode_float8.kernel_for(q, cache) is None
    assert decode_float8.kernel_for(q, cache) is None
    decode_float8._compiled.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "KV cache: a slower kernel for decode attention, attend: no such launch"
    ]


def test_a_draft_is_no_longer_than_what_counts_as_new() -> None:
    """Older tokens are read before the step's own are written."""
    assert 1 + MAX_DRAFTED <= decode_float8.NEWEST
