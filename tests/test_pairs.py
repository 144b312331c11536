"""The cases that stand for all combinations."""

from itertools import combinations

from tests.pairs import pairwise

AXES = ("abcdefg", (1, 2, 8, 16, 32), (10, 20, 30, 40))


def test_every_two_values_meet_in_fewer_cases_than_there_are_combinations() -> None:
    cases = pairwise(*AXES)
    for first, second in combinations(range(len(AXES)), 2):
        met = {(case[first], case[second]) for case in cases}
        assert len(met) == len(AXES[first]) * len(AXES[second])
    assert 35 <= len(cases) < 50  # of 140


def test_the_cases_are_the_same_in_every_process() -> None:
    assert pairwise(*AXES) == pairwise(*AXES)
