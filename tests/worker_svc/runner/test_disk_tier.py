"""Blocks in files: the tokens after them stay the same, whatever happens to the disk."""

import ctypes
import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from pagewire.v1 import worker_pb2
from tests.pace import patience
from tests.worker_svc.conftest import (
    WORKER_CONFIG,
    Attachment,
    Greedy,
    Worker,
    make_prompt,
    make_sequence,
    serving,
)
from tests.worker_svc.runner import tier_transfers
from tests.worker_svc.runner.tier_transfers import KEYS
from wire.columns import UINT64, pack, unpack
from worker_svc.attention.kv_cache import KVCache
from worker_svc.config import WorkerConfig
from worker_svc.process.disk_option import DiskTierOption
from worker_svc.protocol.transfers import DropOrder, TransferEnd, TransferOrder
from worker_svc.runner.block_files import BlockFiles, NamedBlock
from worker_svc.runner.disk_tier import DiskTier
from worker_svc.startup.disk_tier import num_blocks

PROMPT = make_prompt(37, seed=3)  # two full blocks and five tokens in a third
CONTENTS = bytes(range(72)) + bytes(range(100, 172))  # parent and 16 tokens, of two blocks


def transfer(attachment: Attachment, kind: str, **fields: object) -> worker_pb2.TransferDone:
    """Sends a transfer of two blocks and returns its answer."""
    told = {"tier": "disk", "contents": CONTENTS, "block_ids": pack([1, 2])} | fields
    return tier_transfers.transfer(attachment, kind, **told)


@pytest.fixture(scope="module")
def disk_worker(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    option = DiskTierOption(tmp_path_factory.mktemp("disk"), 0.001)
    with serving(replace(WORKER_CONFIG, disk_tier=option), llama_folder) as ready:
        yield ready


def test_the_next_process_tells_what_the_disk_holds_and_goes_on_after_it(
    llama_folder: Path, tmp_path: Path, greedy: Greedy
) -> None:
    """Only a scheduler that knows of it is told."""
    expected = greedy(PROMPT, 6)
    config = replace(WORKER_CONFIG, disk_tier=DiskTierOption(tmp_path / "new", 0.001))
    with serving(config, llama_folder) as first:
        (tier,) = first.describe().description.tiers
        assert tier.name == "disk" and tier.num_blocks == num_blocks(config, tier.bytes_per_block)
        attachment = first.attach()
        attachment.step(
            new_sequences=[make_sequence(0, PROMPT, [1, 2, 3])], slots=[0], num_scheduled=[37]
        )
        stored = transfer(attachment, "store")
        assert (stored.num_blocks, stored.problem) == (2, "") and stored.num_bytes > 0
        attachment.close()

    with serving(config, llama_folder) as second:
        attachment = second.attach(protocol_minor=7)
        attachment.close()
        attachment = second.attach(protocol_minor=8)
        contents = next(attachment.call).tier_contents
        assert contents.tier == "disk"
        told = unpack(contents.keys, UINT64).reshape(-1, 2).tolist()
        assert sorted(told) == sorted([KEYS[:2], KEYS[2:]])
        fetched = transfer(attachment, "fetch", block_ids=pack([8, 7]))
        assert (fetched.num_blocks, fetched.problem) == (2, "")
        back = make_sequence(0, PROMPT, [8, 7, 6], num_computed_tokens=32)
        tokens = attachment.step(new_sequences=[back], slots=[0], num_scheduled=[5])
        for _ in range(5):
            tokens += attachment.step(slots=[0])
        attachment.close()
    assert tokens == expected


def test_another_content_of_the_same_key_is_a_miss(disk_worker: Worker) -> None:
    attachment = disk_worker.attach()
    transfer(attachment, "store")
    done = transfer(attachment, "fetch", transfer_id=2, contents=CONTENTS[:143] + b"?")
    assert done.num_blocks == 1 and done.problem.startswith("there is no block 0000000000000011")
    drop = worker_pb2.DropBlocks(tier="disk", keys=pack(KEYS[:2], UINT64))
    attachment.send_raw(worker_pb2.AttachRequest(drop=drop))
    transfer(attachment, "store", transfer_id=3, keys=pack([1, 2, 3, 4], UINT64))
    done = transfer(attachment, "fetch", transfer_id=4)
    assert done.num_blocks == 0, "it was dropped before the last store"
    attachment.close()


def test_another_model_of_the_same_shape_reads_nothing(llama_folder: Path, tmp_path: Path) -> None:
    """Its weights differ in one number, of which nothing but their bytes tells."""
    config = replace(WORKER_CONFIG, disk_tier=DiskTierOption(tmp_path / "disk", 0.001))
    other = Path(shutil.copytree(llama_folder, tmp_path / "other"))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    for folder in (llama_folder, llama_folder, other):
        with serving(config, folder) as ready:
            attachment = ready.attach()
            transfer(attachment, "store")
            attachment.close()
    assert len(list((tmp_path / "disk").iterdir())) == 2, "a folder each"


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("fetch", {"tier": "host"}, "fetch.tier: there is no tier 'host'"),
        ("fetch", {"block_ids": pack([3, 3])}, "fetch.block_ids: a block appears twice"),
        ("store", {"block_ids": b""}, "store.block_ids: there are none"),
        ("store", {"contents": b""}, "store.contents: 0 bytes are not those of 2 blocks"),
        ("store", {"contents": CONTENTS + b"x"}, "store.contents: 145 bytes are not those of 2"),
        ("fetch", {"contents": CONTENTS[:20]}, "fetch.contents: 20 bytes are not those of 2"),
        ("store", {"keys": b"12345678"}, "store.keys: 1 numbers, not two for each of 2"),
        ("store", {"tier_block_ids": pack([1, 2])}, "store.tier_block_ids: blocks of this tier"),
    ],
)
def test_a_transfer_that_cannot_be_made_ends_the_stream_by_its_name(
    disk_worker: Worker, kind: str, fields: dict[str, object], problem: str
) -> None:
    attachment = disk_worker.attach()
    with pytest.raises(grpc.RpcError) as refused:
        transfer(attachment, kind, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in refused.value.details()
    attachment.cancel()


# --- the tier alone, on disks that fail ----------------------------------------------------------


class Disk(BlockFiles):
    """Files whose writes and reads fail or wait where they were told so."""

    write_error: OSError | None = None
    gate: threading.Event | None = None

    def write(self, block: NamedBlock, payload: memoryview) -> None:
        if self.write_error is not None:
            raise self.write_error
        super().write(block, payload)

    def read(self, block: NamedBlock, payload: memoryview) -> bool:
        if self.gate is not None:
            assert self.gate.wait(patience(10))
        return super().read(block, payload)


class Asked:
    """A tier of a cache whose block n holds the number n, and its answers."""

    def __init__(self, folder: Path, num_blocks: int, max_blocks: int = 1_000) -> None:
        shape = 2, num_blocks + 1, 4, 1, 8
        self.cache = KVCache(*shape, torch.float32, torch.device("cpu"))
        index = torch.arange(1, num_blocks + 1)
        content = index.float().view(-1, 1, 1, 1, 1, 1).expand(-1, *self.cache.block_shape)
        self.cache.write_blocks(index, content.contiguous())
        block_bytes = self.cache.read_blocks(index[:1]).nbytes
        self.disk = Disk(folder, b"layout of a test", block_bytes, max_blocks)
        self.tier = DiskTier(self.cache, self.disk, torch.device("cpu"))
        self.told = list[int]()
        self.tier.tell(lambda keys: self.told.extend(keys[:, 0].tolist()))
        self._num_blocks, self._next_id = num_blocks, 0

    def submit(self, *, is_fetch: bool) -> tuple[int, "list[TransferEnd]"]:
        self._next_id += 1
        blocks = np.arange(1, self._num_blocks + 1)
        keys = np.stack([blocks, blocks], axis=1).astype(np.uint64)
        contents = tuple(bytes([number % 256]) * 24 for number in blocks)
        order = TransferOrder(
            self._next_id, is_fetch, blocks, np.zeros(0, np.int64), keys, "disk", contents
        )
        ends = list[TransferEnd]()
        self.tier.submit(order, lambda: False, lambda _, end: ends.append(end))
        return self._next_id, ends

    def wait(self) -> None:
        done = threading.Event()
        self.tier.when_done(done.set)
        assert done.wait(patience(30))

    def run(self, *, is_fetch: bool) -> TransferEnd:
        _, ends = self.submit(is_fetch=is_fetch)
        self.wait()
        (end,) = ends
        return end

    def forget(self) -> None:
        index = torch.arange(1, self._num_blocks + 1)
        self.cache.write_blocks(index, torch.zeros_like(self.cache.read_blocks(index)))

    @property
    def values(self) -> list[float]:
        found = self.cache.read_blocks(torch.arange(1, self._num_blocks + 1)).flatten(1)
        assert bool((found == found[:, :1]).all()), "a part of a block"
        return list(map(float, found[:, 0]))


@pytest.mark.parametrize("num_blocks", [1, 8, 9, 100])
def test_blocks_come_back_in_their_order(tmp_path: Path, num_blocks: int) -> None:
    asked = Asked(tmp_path, num_blocks)
    assert asked.run(is_fetch=False).num_blocks == num_blocks == asked.tier.num_blocks
    asked.forget()
    assert asked.run(is_fetch=True).num_blocks == num_blocks
    assert asked.values == [*range(1, num_blocks + 1)]
    assert sorted(Asked(tmp_path, 1).told) == [*range(1, num_blocks + 1)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_full_or_broken_disk_is_read_and_written_no_more(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked(tmp_path, 20)
    asked.run(is_fetch=False)
    asked.disk.write_error = OSError(code, os.strerror(code))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            end = asked.run(is_fetch=False)
            assert end.num_blocks == 0 and os.strerror(code) in end.problem
    assert len(caplog.records) == 1, "one line"
    asked.disk.write_error = None
    assert asked.run(is_fetch=False).num_blocks == 0, "off until the next start"
    asked.forget()
    assert asked.run(is_fetch=True).num_blocks == 20 and asked.values == [*range(1, 21)]


def test_a_file_system_of_one_mebibyte_fills_up(tmp_path: Path) -> None:
    """The kernel's own refusal, where this process may mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = str(tmp_path).encode()
    if libc.mount(b"tmpfs", where, b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"mounting is not allowed: {os.strerror(ctypes.get_errno())}")
    try:
        asked = Asked(tmp_path / "tier", 600)
        stored = asked.run(is_fetch=False)
        assert 0 < stored.num_blocks < 600 and "No space left" in stored.problem
        assert asked.tier.why_not_written
        asked.forget()
        fetched = asked.run(is_fetch=True)
        assert fetched.num_blocks >= stored.num_blocks
        assert asked.values[: stored.num_blocks] == [*range(1, stored.num_blocks + 1)]
        assert not any((tmp_path / "tier").glob("*.part"))
    finally:
        libc.umount2(where, 2)


def test_a_slow_fetch_that_is_cancelled_ends_after_the_part_under_way(tmp_path: Path) -> None:
    asked = Asked(tmp_path, 40)
    asked.run(is_fetch=False)
    asked.disk.gate = threading.Event()
    number, ends = asked.submit(is_fetch=True)
    asked.tier.cancel((number,))
    asked.disk.gate.set()
    asked.wait()
    assert ends[0].problem == "it was cancelled" and ends[0].num_blocks <= 8


def test_a_fetch_does_not_wait_for_a_store_and_a_drop_follows_what_was_stored(
    tmp_path: Path,
) -> None:
    asked = Asked(tmp_path, 20)
    _, ends = asked.submit(is_fetch=False)
    asked.tier.drop(DropOrder("disk", np.array([[3, 3]], dtype=np.uint64), is_all=False))
    asked.wait()
    assert ends[0].num_blocks == 20 and asked.tier.num_blocks == 19
    assert asked.run(is_fetch=True).num_blocks == 2
    asked.tier.drop(DropOrder("disk", np.zeros((0, 2), np.uint64), is_all=True))
    asked.wait()
    assert asked.tier.num_blocks == 0 and not list(tmp_path.iterdir())


def test_what_is_more_than_there_is_room_for_is_not_stored(tmp_path: Path) -> None:
    asked = Asked(tmp_path, 20, max_blocks=12)
    end = asked.run(is_fetch=False)
    assert end.num_blocks <= 12 == len(list(tmp_path.iterdir()))
    assert "holds 12 blocks" in end.problem and not asked.tier.why_not_written


# --- the option ----------------------------------------------------------------------------------


def test_the_option_names_a_folder_and_its_room() -> None:
    assert DiskTierOption.parse("/a/b:c:0.5") == DiskTierOption(Path("/a/b:c"), 0.5)
    for bad in ("", "/a", "/a:", ":5", "/a:0", "/a:-1", "/a:inf", "/a:nan", "/a:x"):
        with pytest.raises(ValueError, match="is not PATH:GIB"):
            DiskTierOption.parse(bad)
    config = WorkerConfig(disk_tier=DiskTierOption(Path("/a"), 1.0))
    assert num_blocks(config, 2**20) == 2**30 // (2**20 + 4096)
    assert num_blocks(WorkerConfig(), 1) == 0
