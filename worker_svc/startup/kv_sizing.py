"""Computes the number of KV blocks that fit into memory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from worker_svc.protocol.step import Limits

GIB = 1 << 30
CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 * GIB
SNAPSHOT_SHARE = 0.1
SNAPSHOTS_PER_SEQ = 2  # one while it runs, and one of a sequence that may go on


class CacheTooSmall(ValueError):
    """The KV cache cannot hold one sequence, or memory cannot hold the host blocks."""


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of a device around a profiling run, in bytes."""

    total: int
    used: int  # by all processes, after the run
    peak: int  # of this process's allocator, during the run
    current: int  # of this process's allocator, after it


def num_blocks_on_cuda(memory: CudaMemory, utilization: float, block_bytes: int) -> int:
    """Number of blocks that fit into the utilized share after weights and the largest step."""
    activations = memory.peak - memory.current
    available = int(memory.total * utilization) - memory.used - activations
    return max(0, available) // block_bytes


def num_blocks_on_cpu(cache_bytes: int | None, block_bytes: int, limits: Limits) -> int:
    """Number of blocks in cache_bytes, by default in a part of memory; at most all slots' use."""
    if cache_bytes is not None:
        return cache_bytes // block_bytes
    share = min(CPU_MOST_BYTES, int(CPU_SHARE * available_memory_bytes()))
    usable = 1 + limits.max_num_seqs * limits.most_blocks_held
    return min(share // block_bytes, usable)


def num_state_snapshots(state_bytes: int, max_num_seqs: int, device: torch.device) -> int:
    """Number of snapshots of states by default; 0 for sequences without states."""
    if not state_bytes:
        return 0
    if device.type == "cpu":
        share = min(CPU_MOST_BYTES // 4, int(SNAPSHOT_SHARE * available_memory_bytes()))
    else:
        share = int(SNAPSHOT_SHARE * torch.cuda.mem_get_info(device)[1])
    return min(SNAPSHOTS_PER_SEQ * max_num_seqs, share // state_bytes)


def require_one_sequence(num_blocks: int, limits: Limits) -> None:
    """Raises CacheTooSmall unless a sequence of max_model_len fits next to the null block.

    With fewer blocks the scheduler could preempt a long sequence forever.
    """
    needed = limits.most_blocks_held
    if num_blocks - 1 < needed:
        sizes = " and ".join(str(group.block_size) for group in limits.groups)
        raise CacheTooSmall(
            f"num_blocks {num_blocks} leaves {max(0, num_blocks - 1)} KV blocks of {sizes} "
            f"tokens next to the null block, but max_model_len {limits.max_model_len} needs "
            f"{needed}: give the cache more memory or lower max_model_len"
        )


def require_host_memory(num_host_blocks: int, block_bytes: int, num_tier_blocks: int = 0) -> None:
    """Raises CacheTooSmall if available memory is smaller than the host blocks and the tier."""
    num_blocks, available = num_host_blocks + num_tier_blocks, available_memory_bytes()
    needed = num_blocks * block_bytes
    if needed > available:
        of_tier = f" and {num_tier_blocks} of host_tier_gib," if num_tier_blocks else ""
        raise CacheTooSmall(
            f"host_blocks {num_host_blocks}{of_tier} of {block_bytes} bytes need "
            f"{needed / GIB:.2f} GiB, "
            f"{available / GIB:.2f} GiB of memory are available"
        )


def measure_cuda(device: torch.device) -> CudaMemory:
    """Memory after a profiling run that began with reset_peak_memory_stats."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return CudaMemory(
        total=total,
        used=total - free,
        peak=stats["allocated_bytes.all.peak"],
        current=stats["allocated_bytes.all.current"],
    )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory available to this process, on the machine or in its container."""
    available = _meminfo(root / "proc/meminfo")
    group = root / "sys/fs/cgroup"
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no MemAvailable")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no limit by a control group
        return None
    return int(text) if text.isdigit() else None
