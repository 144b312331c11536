"""When `pagewire up` restarts a service, when it gives up, and when a silence is a hang."""

import pytest

from pagewire.cli.launcher.health_watch import HealthSilence
from pagewire.cli.launcher.restarts import Restarts


def test_pauses_grow_while_a_service_dies_before_it_is_ready_and_the_fifth_death_is_the_last():
    restarts = Restarts()
    assert [restarts.died(None) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, None]
    assert restarts.summary == "died 5 times in a row before it was ready"


def test_a_service_that_had_settled_is_restarted_at_once_however_often():
    restarts = Restarts()
    assert {restarts.died(10.0) for _ in range(1000)} == {0.0}


def test_a_service_that_dies_soon_after_it_was_ready_is_slowed_down_and_then_given_up():
    restarts = Restarts()
    pauses = [restarts.died(1.0) for _ in range(20)]
    assert pauses[:8] == [0.0, 0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(pauses[8:19]) == {10.0}
    assert pauses[19] is None
    assert restarts.summary == "died 20 times in a row, each time soon after it was ready"


def test_a_start_that_succeeds_ends_the_row_of_starts_that_did_not():
    restarts = Restarts()
    for _ in range(4):
        assert restarts.died(None) is not None
    restarts.died(12.0)
    assert restarts.died(None) == 0.0


def test_a_silence_may_be_longer_where_answers_come_late_up_to_a_bound():
    silence = HealthSilence(10.0)
    assert silence.limit_s == 10.0
    for _ in range(7):
        silence.tick(1.0)
    silence.end()
    assert silence.limit_s == pytest.approx(21.0, rel=0.1)
    for _ in range(40):
        silence.tick(1.0)
    assert silence.is_too_long
    silence.end()
    assert silence.limit_s == 60.0


def test_late_answers_are_forgotten():
    silence = HealthSilence(10.0)
    for _ in range(9):
        silence.tick(1.0)
    silence.end()
    for _ in range(300):
        silence.tick(1.0)
        silence.seconds = 0.0
    assert silence.limit_s == 10.0


def test_time_in_which_this_process_stood_still_is_no_silence():
    silence = HealthSilence(10.0)
    silence.tick(3600.0)
    assert silence.seconds == 1.0
