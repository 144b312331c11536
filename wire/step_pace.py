"""Times of steps by their size, and what a limit may therefore expect of the next one.

An upper estimate for limits in seconds, so that they follow the machine; no forecast. The worker
and the scheduler judge by it alike. Knows no clock.
"""

from dataclasses import dataclass

_FADE = 0.9  # of the slowest step of a size, with each quicker one that follows


@dataclass(frozen=True, slots=True)
class _Slowest:
    num_tokens: int
    seconds: float


class StepPace:
    """The slowest of the last steps, by size: sizes that differ by less than two are one."""

    def __init__(self) -> None:
        self._slowest: dict[int, _Slowest] = {}  # by the bits of the number of tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step took so long, or at least so long."""
        size = num_tokens.bit_length()
        before = self._slowest.get(size)
        if before is None or seconds >= _FADE * before.seconds:
            self._slowest[size] = _Slowest(num_tokens, seconds)
        else:
            self._slowest[size] = _Slowest(before.num_tokens, _FADE * before.seconds)

    def expected_s(self, num_tokens: int) -> float | None:
        """Seconds that a step may take; None before any step was observed.

        As its like took, no more than a larger one, or in proportion to a smaller one.
        """
        size = num_tokens.bit_length()
        larger = [other for other in list(self._slowest) if other >= size]
        if larger:
            nearest = self._slowest[min(larger)]
        elif self._slowest:
            nearest = self._slowest[max(self._slowest)]
        else:
            return None
        return nearest.seconds * max(1.0, num_tokens / max(nearest.num_tokens, 1))
