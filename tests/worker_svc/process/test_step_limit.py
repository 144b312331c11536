"""StepLimit ends the process for steps that never end, and for no others."""

import threading

import pytest

from tests.worker_svc.conftest import TIMEOUT_S
from worker_svc.process.step_limit import LONGEST_TICK_S, TICK_S, StepLimit


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def limit(ended: list[str]) -> StepLimit:
    return StepLimit(1.0, ended.append)


def test_a_step_may_take_as_long_as_the_limit_and_no_longer(
    limit: StepLimit, ended: list[str]
) -> None:
    with limit.over(7, 1):
        for _ in range(4):
            limit.tick(0.25)
        assert ended == []
        limit.tick(0.25)
        assert ended == ["step 7 has not ended within 1 s"]


def test_every_step_begins_anew_and_idleness_is_no_step(limit: StepLimit, ended: list[str]) -> None:
    for step_id in range(5):
        with limit.over(step_id, 1):
            limit.tick(0.4)
            limit.tick(0.4)
        limit.tick(0.4)
    assert ended == []


def test_launching_one_step_and_waiting_for_another_are_counted_apart(
    limit: StepLimit, ended: list[str]
) -> None:
    launched, checked = threading.Event(), threading.Event()

    def launch() -> None:
        with limit.over(2, 1):
            launched.set()
            assert checked.wait(TIMEOUT_S)

    with limit.over(1, 1):
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
    with limit.over(1, 1):
        limit.tick(1000.0)
        assert ended == []
        limit.tick(1000.0)
        assert ended == []
        limit.tick(LONGEST_TICK_S)
        assert ended == ["step 1 has not ended within 1 s"]


def run(limit: StepLimit, num_tokens: int, seconds: float) -> None:
    """Advances time by one step, in ticks."""
    with limit.over(1, num_tokens):
        for _ in range(round(seconds / TICK_S)):
            limit.tick(TICK_S)


def test_without_an_option_a_quick_device_that_hangs_is_noticed_after_a_minute(
    ended: list[str],
) -> None:
    limit = StepLimit(None, ended.append)
    limit.follow("cuda", {})
    for _ in range(100):
        run(limit, 8192, 0.25)
    assert limit.of(8192) == limit.of(1) == 60.0
    run(limit, 8192, 60.25)
    assert ended == ["step 1 has not ended within 60 s"]


def test_without_an_option_the_limit_follows_what_start_up_rehearsed(ended: list[str]) -> None:
    limit = StepLimit(None, ended.append)
    limit.follow("cpu", {1: 0.5, 512: 46.0})
    assert limit.of(512) == 30 * 46.0
    assert limit.of(1) == 300.0
    run(limit, 512, 1000.0)
    assert ended == []


def test_the_limit_follows_steps_that_grow_slower(ended: list[str]) -> None:
    limit = StepLimit(None, ended.append)
    limit.follow("cpu", {512: 1.0})
    for seconds in (20.0, 100.0, 400.0):  # increasingly slow, as when memory is short
        run(limit, 512, seconds)
    assert ended == []
    assert limit.of(512) == 30 * 400.0


def test_a_limit_that_is_given_follows_nothing(ended: list[str]) -> None:
    limit = StepLimit(1.0, ended.append)
    limit.follow("cpu", {512: 46.0})
    assert limit.of(512) == 1.0
    unlimited = StepLimit(0.0, ended.append)
    run(unlimited, 1, 10_000.0)
    assert ended == []
