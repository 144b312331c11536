"""What steps took is known by their sizes, and between them."""

import pytest

from scheduler_svc.speculation.pay import StepCosts


def test_costs_lie_between_those_measured() -> None:
    measured = StepCosts()
    measured.observe(2, 1.0)
    measured.observe(6, 3.0)
    assert measured.of(4) == pytest.approx(2.0)
    assert (measured.of(1), measured.of(9)) == (1.0, 3.0)
    assert measured.fewest == 2
    measured.observe(2, 2.0)
    assert measured.of(2) == pytest.approx(1.1)
    measured.observe_best(2, 0.5)
    assert measured.of(2) == pytest.approx(0.5)
    measured.observe_best(2, 1.5)
    assert measured.of(2) == pytest.approx(0.6)
