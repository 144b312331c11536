"""The order in which files store the value heads of delta nets."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """Value heads in turn over key heads: the first one of each, the second one of each, ..."""

    num_key_heads: int
    per_key_head: int
    size: int  # rows or columns of a head
    begin: int = 0  # where they begin
    of_columns: bool = False

    def order(self, group: int = 1) -> list[int]:
        """The stored rows or columns, or groups of so many, in the order of a folder.

        There the heads of one key head lie together.
        """
        size, begin = self.size // group, self.begin // group
        order = [*range(begin)]
        for key_head in range(self.num_key_heads):
            for turn in range(self.per_key_head):
                first = begin + (turn * self.num_key_heads + key_head) * size
                order += range(first, first + size)
        return order
