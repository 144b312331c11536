"""Sliding-window attention: each token attends to the last `window` tokens, itself included.

A window of 0 means none: each token attends to all tokens before it, and that is what all workers
of today serve. The core plans for windows all the same; docs/scheduler.md, "Sliding windows", says
where, and that it is kept for models to come.
"""

from scheduler_svc.core.request.config import SchedulerConfig


def first_read(position: int, window: int) -> int:
    """The first position whose KV the token at `position`, or any after it, reads."""
    return max(0, position - window + 1) if window else 0


def blocks_needed(config: SchedulerConfig, max_len: int) -> int:
    """Most blocks that a sequence of `max_len` tokens holds at once when it runs alone."""
    # The last token is never computed, so it needs no room.
    num_blocks = -(-(max_len - 1) // config.block_size)
    if not config.sliding_window:
        return num_blocks
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    chunk = min(budget, threshold or budget)
    # The window before a chunk, and the chunk, may begin and end inside a block.
    return min(num_blocks, -(-(config.sliding_window - 1 + chunk) // config.block_size) + 1)
