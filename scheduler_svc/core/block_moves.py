"""Contents of KV blocks on the move: to host memory, back, and from one block to another."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Contents of blocks that the worker moves before a step's rows compute, in this order."""

    swapped_out: list[int] = field(default_factory=list)
    to_host: list[int] = field(default_factory=list)  # one for each
    from_host: list[int] = field(default_factory=list)
    swapped_in: list[int] = field(default_factory=list)  # one for each
    copied_from: list[int] = field(default_factory=list)
    copied_to: list[int] = field(default_factory=list)  # one for each

    def __bool__(self) -> bool:
        return bool(self.swapped_out or self.swapped_in or self.copied_to)
