"""The disk tier (--disk-tier PATH:GIB): its size, and which files the served model may read.

A block is of use to the process that has the same weights, computes in the same types and lays its
cache out alike. All of that is in the name of the folder. Weights are told apart by their bytes,
since a model that was trained further has the same shapes: reading them again takes a second for
some gigabytes, mostly out of the page cache, and only where there is a disk tier.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch
from xxhash import xxh3_128

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.config import WorkerConfig
from worker_svc.models.step_model import StepModel
from worker_svc.protocol.step import Limits
from worker_svc.protocol.transfers import content_bytes
from worker_svc.runner.block_files import LAYOUT_BYTES, BlockFiles, file_bytes
from worker_svc.runner.disk_tier import DiskTier
from worker_svc.startup.description import ModelFacts
from worker_svc.startup.kv_sizing import GIB

_LAYOUT_VERSION = 1  # of the order of bytes in a block
_READ_AT_ONCE = 1 << 22
_NUM_THREADS = 4


def num_blocks(config: WorkerConfig, block_bytes: int) -> int:
    """Blocks of so many bytes that the disk tier has room for; 0: there is none."""
    if config.disk_tier is None:
        return 0
    most = file_bytes(block_bytes, max(content_bytes(config.block_size)))
    return int(config.disk_tier.gib * GIB) // most


def make(
    config: WorkerConfig,
    layout: bytes,
    kv_cache: PagedCache,
    limits: Limits,
    device: torch.device,
) -> DiskTier:
    """The tier of a cache with this layout. Its folder need not exist."""
    assert config.disk_tier is not None
    block_bytes = torch.Size(kv_cache.block_shape).numel() * kv_cache.moved_dtype.itemsize
    folder = config.disk_tier.path / layout.hex()
    files = BlockFiles(folder, layout, block_bytes, limits.num_disk_blocks)
    return DiskTier(kv_cache, files, device)


def layout_of(
    config: WorkerConfig,
    folder: Path,
    facts: ModelFacts,
    kv_cache: PagedCache,
    model: StepModel,
) -> bytes:
    """Digest, 16 bytes, of what the bytes of this cache's blocks mean."""
    told = (
        _LAYOUT_VERSION,
        replace(facts, name=""),
        type(model).__name__,  # layers of ours round otherwise than those of transformers
        kv_cache.block_size,
        kv_cache.block_shape,
        str(kv_cache.dtype),
        (model.group.rank, model.group.size),
        (config.load_format, model.device.type),  # random weights are drawn on the device
        (config.ignore_config_keys, config.ignore_weights),
    )
    hashed = blake2b(repr(told).encode(), digest_size=LAYOUT_BYTES)
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    read = [path for path in files if path.is_file()]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for path, digest in zip(read, threads.map(_digest, read), strict=True):
            name = os.fsencode(path.name)
            hashed.update(len(name).to_bytes(4, "little") + name + digest)
    return hashed.digest()


def _digest(path: Path) -> bytes:
    hashed = xxh3_128()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_AT_ONCE):
            hashed.update(part)
    return hashed.digest()
