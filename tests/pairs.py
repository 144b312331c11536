"""Few cases in which every two values of different parameters meet, for all combinations."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value per axis: any two values of any two axes are together in at least one."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    unmet = {pair for case in cases for pair in _pairs(case)}
    chosen: list[tuple[Any, ...]] = []
    while unmet:
        best = max(cases, key=lambda case: len(unmet & _pairs(case)))
        unmet -= _pairs(best)
        chosen.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return chosen


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(case), 2))
