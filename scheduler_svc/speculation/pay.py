"""Times of steps, by a size of theirs.

A step with drafts computes more tokens, and the next one awaits its answer. So drafts pay by
measure alone: on one device seven tokens more are nearly free, on another each costs half a step.
"""

_FADE = 0.9  # of what was measured, with each new step of the same size
MARGIN = 1.03  # a gain of pace below this is noise


class StepCosts:
    """Seconds of decode steps by a number: of their rows, or of those that draft."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        before = self._seconds.get(size, seconds)
        self._seconds[size] = _FADE * before + (1 - _FADE) * seconds

    def observe_best(self, size: int, seconds: float) -> None:
        """The same; if it is less than expected, what was before no longer counts."""
        if seconds < self._seconds.get(size, seconds):
            self._seconds[size] = seconds
        self.observe(size, seconds)

    @property
    def fewest(self) -> int | None:
        """The smallest size that was measured."""
        return min(self._seconds, default=None)

    def of(self, size: int) -> float | None:
        """Expected seconds, between those of the nearest sizes; beyond them, as the nearest took.

        None before any step was measured.
        """
        sizes = self._seconds
        if size in sizes or not sizes:
            return sizes.get(size)
        smaller = max((one for one in sizes if one < size), default=None)
        larger = min((one for one in sizes if one > size), default=None)
        if smaller is None or larger is None:
            return sizes[smaller if larger is None else larger]  # type: ignore[index]
        part = (size - smaller) / (larger - smaller)
        return sizes[smaller] + part * (sizes[larger] - sizes[smaller])
