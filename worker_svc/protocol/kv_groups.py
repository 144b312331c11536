"""KV groups: layers of one kind, which share a block table for each sequence.

A block is a page of equally many bytes for every group, and a group says how many tokens a page
holds and whether its layers read all tokens or the last ones alone. Knows no memory and no model.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One group."""

    block_size: int  # tokens per block
    window: int | None = None  # tokens that each token reads, its own included; None: all

    def num_unread(self, position: int) -> int:
        """Leading blocks that neither the token at a position nor any after it reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks in a table of so many tokens, those included that are not read any more."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks held at once for so many tokens, computed in chunks of at most `chunk`."""
        num_blocks = self.num_blocks(num_tokens)
        if self.window is None:
            return num_blocks
        # The window before a chunk, and the chunk, may begin and end inside a block.
        return min(num_blocks, self.num_blocks(self.window - 1 + chunk) + 1)


@dataclass(frozen=True, slots=True)
class TablePart:
    """A group's columns of a slot's row of block tables, in which those of all groups lie."""

    group: LayerGroup
    begin: int
    width: int  # blocks that hold the longest sequence

    @property
    def columns(self) -> slice:
        """The columns of the row."""
        return slice(self.begin, self.begin + self.width)


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The division of a slot's row of block tables among groups, group 0 first."""

    parts: tuple[TablePart, ...]

    @classmethod
    def of(cls, groups: tuple[LayerGroup, ...], max_model_len: int) -> "TableLayout":
        """Tables of these groups, side by side."""
        parts, begin = [], 0
        for group in groups:
            width = group.num_blocks(max_model_len)
            parts.append(TablePart(group, begin, width))
            begin += width
        return cls(tuple(parts))

    @property
    def width(self) -> int:
        """Columns of the row."""
        return self.parts[-1].begin + self.parts[-1].width

    @property
    def others(self) -> tuple[TablePart, ...]:
        """The parts of the groups after group 0."""
        return self.parts[1:]
