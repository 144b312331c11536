"""The KV groups that a worker serves a model with, and the cache of their layers."""

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.attention.page_cache import PageCache
from worker_svc.config import WorkerConfig
from worker_svc.models.step_model import StepModel


def plan_for(config: WorkerConfig, decoder: StepModel, max_model_len: int) -> KvPlan | None:
    """The groups of a model's layers; None: all layers keep all tokens, under one block table."""
    # A draft model's blocks have the ids of group 0's, and would lose those before a window.
    if config.kv_groups == "one" or config.draft_model is not None:
        return None
    return decoder.kv_plan(config.block_size, max_model_len)


def cache_for(
    decoder: StepModel, plan: KvPlan | None, num_blocks: int, block_size: int
) -> PagedCache:
    """An empty cache; layers of one group need no pages."""
    if plan is None or len(plan.groups) == 1:
        cache: PagedCache = decoder.new_cache(num_blocks, block_size)
        return cache
    return PageCache(plan, num_blocks, decoder.device)
