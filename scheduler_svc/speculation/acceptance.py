"""The share of drafts that come true, by their place: what was expected, corrected by what came."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FADE = 0.99  # with each step
_AT_FIRST = 4.0  # drafts of each place that came as expected, before any was verified

Gains = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verified:
    """The fate of one row's drafts."""

    probability: float  # that one comes true if those before it do, as expected
    num_drafts: int
    num_accepted: int


class Acceptance:
    """The acceptance of all drafts of one core."""

    def __init__(self, most: int) -> None:
        self._places = np.arange(1, most + 1)
        self._expected = np.full(most, _AT_FIRST)
        self._came = np.full(most, _AT_FIRST)

    def expected(self, probabilities: Gains) -> Gains:
        """Probability that all drafts up to each place come true [R, D], by each row's own [R]."""
        ratio = np.minimum.accumulate(self._came / self._expected)
        gains: Gains = probabilities[:, None] ** self._places * np.minimum(ratio, 1.0)
        return gains

    def learn(self, rows: list[Verified]) -> None:
        """Takes note of the rows of a step."""
        self._came = _AT_FIRST + _FADE * (self._came - _AT_FIRST)
        self._expected = _AT_FIRST + _FADE * (self._expected - _AT_FIRST)
        for row in rows:
            places = self._places[: row.num_drafts]
            self._expected[: row.num_drafts] += row.probability**places
            self._came[: row.num_accepted] += 1.0
