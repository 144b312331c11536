"""KV groups: layers of one kind, which share a block table for each sequence.

Blocks of all groups are pages of one pool, of equally many bytes; a group says how many tokens a
page holds, and whether its layers read all tokens or the last ones alone. Group 0 is the one that
a scheduler without groups has.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One group. Raises ValueError for sizes that cannot be."""

    block_size: int  # tokens per block
    window: int | None = None  # tokens that each token reads, itself included; None: all

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"kv_groups: block_size is {self.block_size}, must be at least 1")
        if self.window is not None and self.window < 2:
            raise ValueError(
                f"kv_groups: window is {self.window}: a token would read nothing but itself"
            )

    def num_null(self, position: int) -> int:
        """Leading blocks that neither the token at a position nor any after it reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks held at once for so many tokens, computed in chunks of at most `chunk`."""
        num_blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return num_blocks
        # The window before a chunk, and the chunk, may begin and end inside a block.
        return min(num_blocks, -(-(self.window - 1 + chunk) // self.block_size) + 1)
