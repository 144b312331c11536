"""What is expected of drafts follows what came of them."""

import numpy as np
import pytest

from scheduler_svc.speculation.acceptance import Acceptance, Verified


def test_a_draft_needs_all_before_it() -> None:
    expected = Acceptance(3).expected(np.array([0.5, 0.9]))
    assert expected.tolist() == [
        pytest.approx([0.5, 0.25, 0.125]),
        pytest.approx([0.9, 0.81, 0.729]),
    ]


def test_later_drafts_that_fail_more_often_are_expected_to() -> None:
    acceptance = Acceptance(3)
    for _ in range(300):
        acceptance.learn([Verified(0.9, 3, 1)] * 4)
    first, second, third = acceptance.expected(np.array([0.9]))[0]
    assert first == pytest.approx(0.9)
    assert second < 0.05 and third < 0.05


def test_what_comes_as_expected_stays_so() -> None:
    acceptance, rows = Acceptance(1), [Verified(0.5, 1, 0), Verified(0.5, 1, 1)]
    for _ in range(300):
        acceptance.learn(rows)
    assert acceptance.expected(np.array([0.5]))[0, 0] == pytest.approx(0.5)


def test_gains_fall_in_each_row_whatever_came() -> None:
    acceptance = Acceptance(4)
    for _ in range(100):
        acceptance.learn([Verified(0.3, 4, 4), Verified(0.9, 2, 0)])
    gains = acceptance.expected(np.array([1.0, 0.8]))
    assert (np.diff(gains, axis=1) <= 0).all() and gains.max() <= 1.0
