"""Numbers of KV blocks that fit, for given memory sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import Limits
from worker_svc.startup import kv_sizing
from worker_svc.startup.kv_sizing import GIB, CacheTooSmall, CudaMemory


def test_blocks_on_cuda_match_the_golden_numbers() -> None:
    memory = CudaMemory(total=80 * GIB, used=10 * GIB, peak=40 * GIB, current=5 * GIB)
    block_bytes = 2 * 28 * 4 * 8 * 128 * 2
    assert kv_sizing.num_blocks_on_cuda(memory, 0.95, block_bytes) == 72_557


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_in_fp8_has_twice_the_blocks(kind: torch.dtype) -> None:
    memory = CudaMemory(total=80 * GIB, used=10 * GIB, peak=40 * GIB, current=5 * GIB)
    wide, narrow = (28 * 16 * 8 * 2 * 128 * dtype.itemsize for dtype in (torch.bfloat16, kind))
    num_wide = kv_sizing.num_blocks_on_cuda(memory, 0.9, wide)
    assert num_wide > 10_000
    assert kv_sizing.num_blocks_on_cuda(memory, 0.9, narrow) - 2 * num_wide in (0, 1)


def test_a_full_device_gives_no_blocks() -> None:
    memory = CudaMemory(total=8 * GIB, used=8 * GIB, peak=GIB, current=GIB)
    assert kv_sizing.num_blocks_on_cuda(memory, 0.9, 1000) == 0


def test_blocks_on_cpu_are_a_share_of_memory_capped_by_what_slots_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(1, 16, max_num_seqs=2, max_num_batched_tokens=9, max_model_len=33, vocab_size=9)
    monkeypatch.setattr(kv_sizing, "available_memory_bytes", lambda: 4000)
    assert kv_sizing.num_blocks_on_cpu(None, 500, limits) == 2
    assert kv_sizing.num_blocks_on_cpu(None, 10, limits) == 7
    assert kv_sizing.num_blocks_on_cpu(9999, 10, limits) == 999
    monkeypatch.setattr(kv_sizing, "available_memory_bytes", lambda: 1 << 50)
    assert kv_sizing.num_blocks_on_cpu(None, GIB, limits) == 4


def test_one_sequence_of_full_length_must_fit_beside_the_null_block() -> None:
    limits = Limits(1, 16, max_num_seqs=2, max_num_batched_tokens=9, max_model_len=48, vocab_size=9)
    kv_sizing.require_one_sequence(4, limits)
    with pytest.raises(CacheTooSmall, match=r"num_blocks 4 leaves 3 .* max_model_len 49 needs 4"):
        kv_sizing.require_one_sequence(4, replace(limits, max_model_len=49))


def test_a_sequence_needs_the_blocks_of_all_groups_and_of_a_window_no_more_than_it() -> None:
    limits = Limits(
        num_blocks=1,
        block_size=32,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=320,
        vocab_size=9,
        kv_groups=(LayerGroup(32), LayerGroup(16, window=33)),
    )
    # 10 of all tokens; 48 tokens of a window and a chunk may begin and end inside a block: 4.
    kv_sizing.require_one_sequence(15, limits)
    with pytest.raises(CacheTooSmall, match=r"13 KV blocks of 32 and 16 tokens .* needs 14"):
        kv_sizing.require_one_sequence(14, limits)
    assert kv_sizing.num_blocks_on_cpu(1 << 20, 1 << 10, limits) == 1 << 10


def machine(root: Path, group: dict[str, str]) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    50 kB\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, 50 * 1024),
        ({"memory.max": "max\n", "memory.current": "1000\n"}, 50 * 1024),
        ({"memory.max": "9000\n", "memory.current": "1000\n"}, 8000),
        ({"memory.max": "9000\n", "memory.current": "9500\n"}, 0),
    ],
)
def test_a_containers_limit_counts_as_the_memory_there_is(
    tmp_path: Path, group: dict[str, str], expected: int
) -> None:
    assert kv_sizing.available_memory_bytes(machine(tmp_path, group)) == expected
