"""Sources of random choices: a seed, or hypothesis, which can shrink a failing case."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Draw(Protocol):
    """Random choices for a rule."""

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""

    def pick(self, choices: Sequence[T]) -> T:
        """One of the choices, which must not be empty."""


class SeededDraw:
    """The same seed gives the same choices."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._rng.randint(low, max(low, high))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self._rng.randrange(len(choices))]

    def weighted(self, choices: Sequence[T], weights: Sequence[float]) -> T:
        """One of the choices, with probability proportional to its weight."""
        return self._rng.choices(choices, weights)[0]


class HypothesisDraw:
    """Choices made by hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, max(low, high)))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self._data.draw(st.integers(0, len(choices) - 1))]
