"""Requests whose scheduler is gone, submitted to the next one with their output so far."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core import FinishReason, RefusalKind, Refused, Request, Scheduler
from tests.scheduler_svc.core.builders import SMALL, make_request, make_scheduler, plan_step, step
from tests.scheduler_svc.core.simulation import Simulation


def continued(request: Request, output: list[int]) -> Request:
    return replace(request, output_token_ids=np.array(output, dtype=np.int32))


def run(request: Request) -> tuple[list[int], dict[int, FinishReason]]:
    simulation = Simulation(replace(SMALL, eos_token_ids=()))
    simulation.add(request)
    while simulation.live:
        simulation.schedule()
        simulation.update()
    return simulation.outputs[0], simulation.ends


@pytest.mark.parametrize("num_known", [0, 1, 4, 9])
def test_the_rest_of_an_output_is_the_same_wherever_it_was_cut(num_known: int) -> None:
    request = make_request("a", 7, max_tokens=10, min_tokens=3)
    whole, ends = run(request)
    assert len(whole) == 10
    assert run(continued(request, whole[:num_known])) == (whole, ends)


def test_usage_and_limits_count_the_output_so_far_as_output() -> None:
    scheduler = make_scheduler()
    scheduler.add(continued(make_request("a", 9, max_tokens=4, min_tokens=4), [70, 71]))
    plan = plan_step(scheduler)
    (entered,) = plan.new_sequences
    assert entered.token_ids.tolist() == [*range(1, 10), 70, 71]
    assert len(entered.request.prompt_token_ids) == 9
    scheduler.worker_lost()
    assert not step(scheduler, 0).finished  # the stop token comes too early, as third of four
    (finished,) = step(scheduler, 5).finished
    assert finished.reason is FinishReason.LENGTH
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (9, 4)


def full_queue() -> Scheduler:
    scheduler = make_scheduler(max_waiting_requests=1)
    scheduler.add(make_request("first", 3))
    return scheduler


def test_who_was_let_in_once_is_not_refused_for_overload() -> None:
    scheduler = full_queue()
    with pytest.raises(Refused) as refusal:
        scheduler.add(make_request("new", 3))
    assert refusal.value.kind is RefusalKind.OVERLOADED
    scheduler.add(continued(make_request("again", 3), []))
    scheduler.add(continued(make_request("going on", 3), [5]))


def test_who_only_says_to_have_been_let_in_is_refused_like_a_new_one() -> None:
    scheduler = make_scheduler(max_waiting_tokens=9)
    scheduler.add(make_request("first", 3))
    claimed = replace(make_request("claimed", 3), resumed_by_client=True)
    with pytest.raises(Refused, match="with 7 more") as refusal:
        scheduler.add(continued(claimed, [5] * 4))
    assert refusal.value.kind is RefusalKind.OVERLOADED
    scheduler.add(continued(claimed, [5] * 3))  # nine tokens may wait


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ([5, 1000], r"outside 0\.\.999"),
        ([5, -1], r"outside 0\.\.999"),
        ([5] * 8, "has 8 tokens, it ended at 8"),
        ([5, 5, 0, 6], "ended with token 0"),
        ([5, 7], "ended with token 7"),
    ],
)
def test_an_output_that_cannot_go_on_is_refused_by_name(output: list[int], problem: str) -> None:
    request = make_request("a", 3, max_tokens=8, min_tokens=2, stop_token_ids=(7,))
    with pytest.raises(Refused, match=problem) as refusal:
        make_scheduler().add(continued(request, output))
    assert refusal.value.kind is RefusalKind.INVALID
    make_scheduler().add(continued(request, [7, 5]))  # below min_tokens it did not stop
