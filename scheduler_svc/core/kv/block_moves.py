"""Copies of KV blocks that a step makes: to host memory, back, and between device blocks."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Block copies that the worker makes, in this order, before a step's rows compute."""

    swapped_out: list[int] = field(default_factory=list)
    to_host: list[int] = field(default_factory=list)  # one per swapped-out block
    from_host: list[int] = field(default_factory=list)
    swapped_in: list[int] = field(default_factory=list)  # one per host block
    copied_from: list[int] = field(default_factory=list)
    copied_to: list[int] = field(default_factory=list)  # one per source block

    def __bool__(self) -> bool:
        return bool(self.swapped_out or self.swapped_in or self.copied_to)
