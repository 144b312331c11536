"""The time for which a sign of life is waited for, in virtual seconds."""

import pytest

from wire.patience import Patience


def test_a_peer_that_is_in_time_has_the_least_limit() -> None:
    patience = Patience(3.0, 15.0)
    for _ in range(100):
        patience.heard(0.75)
    assert patience.limit_s == 3.0


def test_a_late_sign_widens_the_limit_up_to_a_bound() -> None:
    patience = Patience(3.0, 15.0)
    patience.heard(2.0)
    assert patience.limit_s == 6.0
    patience.heard(100.0)
    assert patience.limit_s == 15.0


def test_a_wait_that_was_given_up_doubles_the_next() -> None:
    patience = Patience(2.0, 30.0)
    limits = []
    for _ in range(6):
        limits.append(patience.limit_s)
        patience.gave_up()
    assert limits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_delays_are_forgotten_with_time() -> None:
    patience = Patience(3.0, 15.0)
    patience.heard(4.0)
    patience.fade(60.0)
    assert patience.limit_s == pytest.approx(6.0)
    patience.fade(60.0)
    assert patience.limit_s == 3.0


def test_another_peer_begins_anew() -> None:
    patience = Patience(3.0, 15.0)
    patience.heard(4.0)
    patience.forget()
    assert patience.limit_s == 3.0
