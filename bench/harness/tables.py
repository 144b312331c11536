"""Pages for sequences that a benchmark lets enter a runner by itself, by KV group."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worker_svc.config import WorkerConfig
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.startup.startup import LoadedModel


def num_pages(groups: Sequence[LayerGroup], num_tokens: int) -> int:
    """Pages of a sequence that keeps so many tokens in every group, those before a window too."""
    return sum(group.num_blocks(num_tokens) for group in groups)


def tables(
    groups: Sequence[LayerGroup], num_tokens: int, slot: int
) -> tuple[NDArray[np.int32], tuple[NDArray[np.int32], ...]]:
    """A slot's own block table of group 0, and of each group after it.

    Page 0 is the null block. Slots of as many tokens have pages that follow each other.
    """
    first, found = 1 + slot * num_pages(groups, num_tokens), []
    for group in groups:
        count = group.num_blocks(num_tokens)
        found.append(np.arange(first, first + count, dtype=np.int32))
        first += count
    return found[0], tuple(found[1:])


def pages_for(model: LoadedModel, config: WorkerConfig, num_rows: int) -> int:
    """Pages of a runner in which so many rows have the longest context."""
    plan, longest = model.kv_plan, model.facts.max_model_len
    groups = (LayerGroup(config.block_size),) if plan is None else plan.groups
    return 2 + num_rows * num_pages(groups, longest)
