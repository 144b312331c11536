"""StepClock: idle time and busy time, measured by the device's own clock."""

import time

import pytest
import torch

from worker_svc.device.step_clock import StepClock

DEVICES = [
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def run_step(device: torch.device, before: StepClock | None) -> StepClock:
    clock = StepClock(device, before)
    clock.mark()
    matrix = torch.ones(256, 256, device=device)
    for _ in range(20):
        matrix = matrix @ matrix / 256
    clock.mark()
    return clock


@pytest.mark.parametrize("name", DEVICES)
def test_busy_and_idle_time_add_up_to_no_more_than_what_passed(name: str) -> None:
    device = torch.device(name)
    first = run_step(device, None)
    first.wait()
    assert first.idle_us() == 0
    clocks, started = [first], time.perf_counter()
    for _ in range(5):
        clocks.append(run_step(device, clocks[-1]))
    clocks[-1].wait()
    elapsed_us = (time.perf_counter() - started) * 1e6
    queued = clocks[2:]  # earlier phases began before the measurement
    spent_us = [sum(clock.spans_us()) + clock.idle_us() for clock in queued]
    assert all(sum(clock.spans_us()) > 0 for clock in queued)
    assert sum(spent_us) <= elapsed_us + len(queued)  # each may be rounded up


@pytest.mark.parametrize("name", DEVICES)
def test_a_pause_between_steps_is_idle_time(name: str) -> None:
    first = run_step(torch.device(name), None)
    first.wait()
    time.sleep(0.02)
    second = run_step(torch.device(name), first)
    second.wait()
    assert second.idle_us() >= 20_000
