"""The time after which a step's worker counts as hung, by what was measured; no clock."""

from dataclasses import replace

import numpy as np

from pagewire.v1 import timing_pb2
from scheduler_svc.core import StepPlan
from scheduler_svc.worker.pace import Pace
from tests.scheduler_svc.core.builders import make_request, make_scheduler, plan_step

LEAST_S = 10.0


def plan_of(num_tokens: int) -> StepPlan:
    """A step of one row."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    plan = plan_step(scheduler)
    return replace(plan, reset=False, num_scheduled=np.array([num_tokens], dtype=np.int32))


def run(pace: Pace, num_tokens: int, seconds: float, times: int = 1) -> None:
    """Steps one after the other."""
    for _ in range(times):
        now_s = pace._last_done_s
        pace.stepped(plan_of(num_tokens), now_s, now_s + seconds)


def rehearsed(num_tokens: int, seconds: float) -> Pace:
    pace = Pace()
    pace.new_worker([timing_pb2.RehearsedStep(num_tokens=num_tokens, seconds=seconds)])
    return pace


def test_a_quick_worker_has_the_least_limit_once_it_was_seen() -> None:
    pace = rehearsed(512, 0.3)
    assert pace.timeout_s(plan_of(1), LEAST_S) == 60.0, "its first steps may be slow"
    run(pace, 512, 0.3)
    run(pace, 1, 0.01, times=3)
    assert pace.timeout_s(plan_of(512), LEAST_S) == LEAST_S
    assert pace.timeout_s(plan_of(1), LEAST_S) == LEAST_S


def test_the_first_step_of_a_slow_worker_has_the_time_that_its_start_up_shows() -> None:
    pace = rehearsed(512, 46.0)
    assert pace.timeout_s(plan_of(512), LEAST_S) == 460.0
    assert pace.timeout_s(plan_of(1), LEAST_S) == 460.0, "no longer than a larger one"


def test_a_large_prompt_after_ever_so_many_small_steps_is_no_hang() -> None:
    pace = Pace()
    run(pace, 512, 46.0)
    run(pace, 1, 0.2, times=5000)  # by then the fit knows nothing of the prompt
    assert pace.timeout_s(plan_of(512), LEAST_S) >= 460.0
    assert pace.timeout_s(plan_of(1), LEAST_S) == LEAST_S


def test_a_step_that_was_given_up_has_twice_as_long_on_the_same_worker() -> None:
    pace = Pace()
    run(pace, 8, 0.01, times=5)
    assert pace.timeout_s(plan_of(8), LEAST_S) == LEAST_S
    pace.gave_up(plan_of(8), 10.0)
    assert pace.timeout_s(plan_of(8), LEAST_S) == 20.0
    pace.new_worker()
    run(pace, 8, 0.01)
    assert pace.timeout_s(plan_of(8), LEAST_S) == LEAST_S
