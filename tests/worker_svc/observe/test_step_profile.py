"""Recordings of steps, on devices that wait and on those that do not."""

import time
from collections import defaultdict

import pytest
import torch

from worker_svc.observe.kernel_profile import KernelProfile
from worker_svc.observe.step_profile import ComputedRows, StepInterval, StepProfile
from worker_svc.protocol.step import StepTimings

ROWS = ComputedRows(num_tokens=3, num_decode_rows=2)


def check_nesting(intervals: list[StepInterval]) -> None:
    tracks: dict[str, list[StepInterval]] = defaultdict(list)
    for interval in intervals:
        tracks[interval.track].append(interval)
    for track in tracks.values():
        ends_ns: list[int] = []
        for one in sorted(track, key=lambda i: (i.begin_ns, -i.duration_ns)):
            while ends_ns and ends_ns[-1] <= one.begin_ns:
                ends_ns.pop()
            assert one.duration_ns >= 0
            assert not ends_ns or one.begin_ns + one.duration_ns <= ends_ns[-1], one
            ends_ns.append(one.begin_ns + one.duration_ns)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_intervals_nest_even_where_the_devices_clock_says_more(is_asynchronous: bool) -> None:
    profile = StepProfile(3, is_asynchronous=is_asynchronous)
    for step_id in range(1, 6):
        started_s = time.perf_counter()
        time.sleep(0.001)
        # The last phase, and of the asynchronous device the whole, is longer than it can have been.
        timings = StepTimings(prepare_us=100, forward_us=300, sample_us=200, copy_us=10**6)
        profile.computed(step_id, ROWS, timings, started_s)
        now_ns = time.perf_counter_ns()
        assert profile.is_full.is_set() is (step_id > 3)
        profile.sent(step_id, now_ns, now_ns + 5)
    found = profile.take()
    assert profile.num_recorded == 3 and profile.take() == []
    steps = [one for one in found if one.name == "step"]
    assert [(s.step_id, s.num_tokens, s.num_decode_rows) for s in steps] == [
        (1, 3, 2),
        (2, 3, 2),
        (3, 3, 2),
    ]
    names = {one.name for one in found}
    assert names == {"step", "launch", "compute", "sample", "copy", "send"}
    check_nesting(found)


def test_kernels_lie_on_the_same_clock() -> None:
    """By what torch says of the CPU, which every machine has: of kernels it says the same."""
    began_ns = time.perf_counter_ns()
    with KernelProfile("CPU") as profile:
        torch.ones(64, 64) @ torch.ones(64, 64)
    ended_ns = time.perf_counter_ns()
    found = profile.intervals()
    assert "aten::matmul" in {one.name for one in found}
    slack_ns = 10_000_000
    for one in found:
        assert began_ns - slack_ns <= one.begin_ns
        assert one.begin_ns + one.duration_ns <= ended_ns + slack_ns
