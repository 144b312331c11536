"""The workload is the published one, and steps are timed only while every request decodes."""

from bench.harness.client import Mark, Run
from bench.harness.workloads import uneven, workload
from pagewire.v1 import scheduler_pb2
from wire.columns import UINT32, pack


def test_the_workload_of_seed_0_has_the_published_number_of_tokens() -> None:
    requests = workload(0, 256)
    assert sum(request.max_tokens for request in requests) == 133_966
    lengths = [len(request.prompt) for request in requests]
    assert (min(lengths) >= 100, max(lengths) <= 1024) == (True, True)


def test_uneven_requests_end_far_apart() -> None:
    """A batch of sixteen that ends together has at most two thirds of its rows at work."""
    outputs = [request.max_tokens for request in uneven(0, 64)]
    assert min(outputs) >= 10 and max(outputs) <= 200
    longest = sum(max(outputs[at : at + 16]) for at in range(0, 64, 16))
    assert sum(outputs) < longest * 16 * 2 / 3


def test_steps_are_timed_between_the_last_start_and_the_first_end() -> None:
    run = Run(started_s=0.0, num_tokens=[0, 0])

    def bring(handles: list[int], now_s: float, ended: tuple[int, ...] = ()) -> None:
        finished = [scheduler_pb2.Finished(handle=handle) for handle in ended]
        column = pack(handles, UINT32)
        run.note(scheduler_pb2.SessionResponse(handles=column, finished=finished), now_s)

    bring([0, 0, 0], 5.0)  # one is ahead of the other
    for index in range(8):
        bring([0, 1], 10.0 + index)
    for index in range(4):
        bring([0, 1], 20.0 + index * 0.5)
    bring([0, 1], 22.0, ended=(1,))
    bring([0], 30.0, ended=(0,))
    assert run.settled == Mark(19, 17.0)
    assert run.step_ms == (22.0 - 17.0) / 5 * 1e3
    assert run.num_tokens == [17, 13]


def test_a_message_that_brings_two_steps_counts_as_two() -> None:
    run = Run(started_s=0.0, num_tokens=[0, 0])
    run.note(scheduler_pb2.SessionResponse(handles=pack([0, 1] * 8, UINT32)), 1.0)
    ends = [scheduler_pb2.Finished(handle=handle) for handle in (0, 1)]
    both = scheduler_pb2.SessionResponse(handles=pack([0, 1] * 2, UINT32), finished=ends)
    run.note(both, 1.5)
    assert run.step_ms == 250.0
