"""Learns how soon sessions come back: the time within which most of those that do have come.

Pauses differ by orders of magnitude (a tool, a person) and by deployment, so they are counted in
classes that double, and older ones fade. This module reads no clock.
"""

import math

_LEAST_S = 1 / 64  # the first class is up to this
_NUM_CLASSES = 24  # the last one is from 36 hours on
_MOST = 512  # counts are halved when they reach this
_SHARE = 0.97  # of returns, within the horizon
_AT_FIRST_S = 8.0
_ENOUGH = 16  # returns before the first horizon that is learned


class ReturnGaps:
    """Counts of pauses between a session's turns, by length."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_CLASSES
        self._total = 0
        self.horizon_s = _AT_FIRST_S

    def observe(self, gap_s: float) -> None:
        """Counts a pause."""
        place = math.ceil(math.log2(max(gap_s, _LEAST_S) / _LEAST_S))
        self._counts[min(place, _NUM_CLASSES - 1)] += 1
        self._total += 1
        if self._total >= _MOST:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)
        if self._total >= _ENOUGH:
            self.horizon_s = self._within(_SHARE)

    def _within(self, share: float) -> float:
        num, wanted = 0, share * self._total
        for place, count in enumerate(self._counts):
            num += count
            if num >= wanted:
                return _LEAST_S * float(2**place)
        return _LEAST_S * float(2**_NUM_CLASSES)
