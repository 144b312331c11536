"""The distance of a worker's clock from ours, by what must have come before what. Pure.

A step begins there after it was sent here, and ends there before its result is here. Of all steps
and messages the tightest bounds count; the middle between them is at most half of their distance
off.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ClockBounds:
    """Bounds of what to add to a worker's time to have ours, in nanoseconds."""

    least: int
    most: int

    def after(self, ours_ns: int, theirs_ns: int) -> None:
        """Notes that an event there at `theirs_ns` came after one here at `ours_ns`."""
        self.least = max(self.least, ours_ns - theirs_ns)

    def before(self, theirs_ns: int, ours_ns: int) -> None:
        """Notes that an event there at `theirs_ns` came before one here at `ours_ns`."""
        self.most = min(self.most, ours_ns - theirs_ns)

    @property
    def offset_ns(self) -> int:
        """The number of nanoseconds to add."""
        return (self.least + self.most) // 2

    @property
    def error_ns(self) -> int:
        """Its largest error; clocks that drift may contradict each other by as much."""
        return abs(self.most - self.least + 1) // 2
