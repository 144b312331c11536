"""The KV groups that a worker serves a model with, and the cache of their layers."""

from dataclasses import replace

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.attention.page_cache import PageCache
from worker_svc.config import WorkerConfig
from worker_svc.models.step_model import StepModel
from worker_svc.protocol.step import Limits


def has_one_table(config: WorkerConfig) -> bool:
    """True if the options leave all layers under one block table, whatever the model."""
    # A draft model's blocks have the ids of group 0's, and would lose those before a window. Pages
    # of a group have any multiple of the block size, which flash-attn was not shown to read.
    is_asked_for = config.kv_groups == "one" or config.attention_backend == "flash-attn"
    return is_asked_for or config.draft_model is not None


def plan_for(config: WorkerConfig, decoder: StepModel, max_model_len: int) -> KvPlan | None:
    """The groups of a model's layers; None: all layers keep all tokens, under one block table."""
    if has_one_table(config):
        return None
    return decoder.kv_plan(config.block_size, max_model_len)


def with_groups(limits: Limits, plan: KvPlan | None) -> Limits:
    """The limits of a runner whose layers are in these groups."""
    if plan is None:
        return limits
    return replace(limits, block_size=plan.groups[0].block_size, kv_groups=plan.groups)


def cache_for(
    decoder: StepModel, plan: KvPlan | None, num_blocks: int, block_size: int
) -> PagedCache:
    """An empty cache; layers of one group need no pages."""
    if plan is None or len(plan.groups) == 1:
        cache: PagedCache = decoder.new_cache(num_blocks, block_size)
        return cache
    return PageCache(plan, num_blocks, decoder.device)
