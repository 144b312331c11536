"""Tells if a cache can hold one sequence, before minutes go into reading weights."""

from collections.abc import Sequence

import torch

from worker_svc.config import GPU_MEMORY_UTILIZATION, WorkerConfig
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import ModelSpec
from worker_svc.protocol.step import Limits
from worker_svc.startup import kv_sizing
from worker_svc.startup.kv_sizing import CudaMemory


def require_room(
    config: WorkerConfig,
    models: Sequence[ModelSpec],
    kv_dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
) -> None:
    """Raises CacheTooSmall if one sequence would not fit even if the weights took no memory.

    `models` are the one that is served, and one that drafts for it. Where layers with windows have
    pages of their own the loaded model is looked at: how many it needs is not known here.
    """
    if config.kv_groups == "auto" and _has_windows(models[0], limits):
        return
    num_blocks = config.num_kv_blocks or _most_blocks(config, models, kv_dtype, device, limits)
    kv_sizing.require_one_sequence(num_blocks, limits)


def _has_windows(model: ModelSpec, limits: Limits) -> bool:
    windows = (attention.window for attention in model.attentions)
    return any(window is not None and window < limits.max_model_len for window in windows)


def bytes_of_a_block(
    config: WorkerConfig, models: Sequence[ModelSpec], kv_dtype: torch.dtype
) -> int:
    """Bytes of a block on one rank; the blocks of all models have the same ids."""
    shards = [Sharding(model, 0, config.tensor_parallel_size).spec for model in models]
    return sum(config.block_size * shard.kv_width * kv_dtype.itemsize for shard in shards)


def _most_blocks(
    config: WorkerConfig,
    models: Sequence[ModelSpec],
    kv_dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
) -> int:
    size_bytes = bytes_of_a_block(config, models, kv_dtype)
    if device.type == "cpu":
        gib = config.kv_cache_gib
        cache_bytes = None if gib is None else int(gib * kv_sizing.GIB)
        size_bytes *= config.tensor_parallel_size  # one memory holds the caches of all ranks
        return kv_sizing.num_blocks_on_cpu(cache_bytes, size_bytes, limits)
    free, total = torch.cuda.mem_get_info(device)
    memory = CudaMemory(total=total, used=total - free, peak=0, current=0)
    utilization = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    return kv_sizing.num_blocks_on_cuda(memory, utilization, size_bytes)
