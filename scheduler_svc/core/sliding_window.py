"""What a model with a sliding window still reads: of each token, the last `window` up to itself.

A window of 0 is none: every token reads everything before it, and that is what all workers of today
serve. The core plans for windows all the same; docs/scheduler.md, "Sliding windows", says where,
and that it is kept for models to come.
"""

from scheduler_svc.core.config import SchedulerConfig


def first_read(position: int, window: int) -> int:
    """The first token whose KV the token at this position, or any behind it, reads."""
    return max(0, position - window + 1) if window else 0


def blocks_needed(config: SchedulerConfig, max_len: int) -> int:
    """Most blocks that a sequence of so many tokens holds at once, if it runs alone."""
    # The last token is never computed, so it needs no room.
    num_blocks = -(-(max_len - 1) // config.block_size)
    if not config.sliding_window:
        return num_blocks
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    chunk = min(budget, threshold or budget)
    # The window before a chunk and the chunk may begin and end anywhere in a block.
    return min(num_blocks, -(-(config.sliding_window - 1 + chunk) // config.block_size) + 1)
