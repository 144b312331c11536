"""Steps that never end are noticed, and nothing else is taken for one."""

import threading

import pytest

from worker_svc.step_limit import LONGEST_TICK_S, StepLimit

from .conftest import TIMEOUT_S


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def limit(ended: list[str]) -> StepLimit:
    return StepLimit(1.0, ended.append)


def test_a_step_may_take_as_long_as_the_limit_and_no_longer(
    limit: StepLimit, ended: list[str]
) -> None:
    with limit.over(7):
        for _ in range(4):
            limit.tick(0.25)
        assert ended == []
        limit.tick(0.25)
        assert ended == ["step 7 has not ended within 1 s"]


def test_every_step_begins_anew_and_idleness_is_no_step(limit: StepLimit, ended: list[str]) -> None:
    for step_id in range(5):
        with limit.over(step_id):
            limit.tick(0.4)
            limit.tick(0.4)
        limit.tick(0.4)
    assert ended == []


def test_launching_one_step_and_waiting_for_another_are_counted_apart(
    limit: StepLimit, ended: list[str]
) -> None:
    launched, checked = threading.Event(), threading.Event()

    def launch() -> None:
        with limit.over(2):
            launched.set()
            assert checked.wait(TIMEOUT_S)

    with limit.over(1):
        limit.tick(0.4)
        limit.tick(0.4)
        thread = threading.Thread(target=launch)
        thread.start()
        assert launched.wait(TIMEOUT_S)
        limit.tick(0.4)
        checked.set()
        thread.join()
    assert ended == ["step 1 has not ended within 1 s"]


def test_time_in_which_the_process_stood_still_is_not_the_devices(
    limit: StepLimit, ended: list[str]
) -> None:
    with limit.over(1):
        limit.tick(1000.0)
        assert ended == []
        limit.tick(1000.0)
        assert ended == []
        limit.tick(LONGEST_TICK_S)
        assert ended == ["step 1 has not ended within 1 s"]
