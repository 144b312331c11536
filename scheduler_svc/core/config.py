"""The limits that a scheduler core is built with; checked once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker group and the policy's few knobs.

    Raises ValueError naming the field when a combination cannot work.
    """

    num_blocks: int  # the null block 0 included
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    long_prefill_token_threshold: int = (
        0  # most prompt tokens of one sequence in a step; 0: no limit
    )
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks is {self.num_blocks}, must be at least 2 (block 0 is null)"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}, must be at least 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a full decode batch would not fit in one step"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError("long_prefill_token_threshold must not be negative")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that a sequence can hold."""
        return self.num_blocks - 1
