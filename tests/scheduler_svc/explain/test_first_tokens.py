"""The way of a first token through scheduler and worker: its parts add up."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import debug_pb2, scheduler_pb2, timing_pb2, types_pb2
from scheduler_svc.core import Phase, Timeline
from scheduler_svc.core.history.recent import KEPT_REQUESTS
from scheduler_svc.explain.first_tokens import FirstTokens, FirstTokenStep
from simulator.workers.fake_worker import FakeModel

TIMES_S = st.floats(0.0, 2.0)
MICROSECONDS = st.integers(0, 3_000_000)


def sum_of(path: Any) -> float:
    return float(sum(stage.seconds for stage in path))


@given(
    st.lists(st.tuples(st.sampled_from(list(Phase)), TIMES_S), max_size=6),
    st.tuples(TIMES_S, TIMES_S, TIMES_S),
    st.tuples(*[MICROSECONDS] * 5),
    st.booleans(),
)
def test_the_parts_add_up(
    stays: list[tuple[Phase, float]],
    steps_s: tuple[float, float, float],
    timings: tuple[int, ...],
    is_admitted: bool,
) -> None:
    """Also where a worker says that it took longer than the step did."""
    arrival_s, now_s = 1000.0, 1000.0
    timeline = Timeline(arrival_s)
    for phase, took_s in stays:
        now_s += took_s
        timeline.enter(phase, now_s)
    sent_s = now_s + steps_s[0]
    received_s = sent_s + steps_s[1]
    names = ("queue_us", "prepare_us", "forward_us", "sample_us", "copy_us")
    told = timing_pb2.StepTimings(**dict(zip(names, timings, strict=True)))
    admitted = frozenset({"a"} if is_admitted else ())
    step = FirstTokenStep(sent_s, received_s, received_s + steps_s[2], told, admitted)
    found = FirstTokens()
    found.note(["a"], step)
    path = found.path("a", timeline, arrival_s)
    assert sum_of(path) == pytest.approx(step.applied_s - arrival_s, abs=1e-5)
    assert all(stage.seconds >= 0 for stage in path)
    assert not found.path("b", timeline, arrival_s)


def test_an_id_that_was_used_before_and_one_that_is_forgotten_have_none() -> None:
    found, step = (
        FirstTokens(),
        FirstTokenStep(5.0, 6.0, 7.0, timing_pb2.StepTimings(), frozenset()),
    )
    found.note(["used before"], step)
    assert not found.path("used before", Timeline(5.5), 5.5)
    found.note([f"{number}" for number in range(KEPT_REQUESTS)], step)
    assert found.path("0", Timeline(1.0), 1.0) and not found.path("used before", Timeline(1.0), 1.0)


@pytest.mark.parametrize(("num_prompt", "waits_for_steps"), [(5, False), (90, True)])
async def test_a_long_prompt_has_earlier_steps_and_a_short_one_has_none(
    make_cluster: Callable[..., AbstractAsyncContextManager[Any]],
    num_prompt: int,
    waits_for_steps: bool,
) -> None:
    model = FakeModel(num_blocks=64, max_model_len=128)
    async with make_cluster(model, max_num_batched_tokens=32, max_num_seqs=4) as cluster:
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id="a",
            prompt_token_ids=range(1, num_prompt + 1),
            sampling=types_pb2.SamplingParams(max_tokens=3),
        )
        async for _ in cluster.scheduler.Generate(request):
            pass
        answer = await cluster.debug.Explain(debug_pb2.ExplainRequest(request_id="a"))
    names = [stage.name for stage in answer.first_token]
    assert ("earlier steps of the prompt" in names) is waits_for_steps
    assert ("plan and encode" in names) is not waits_for_steps
    assert 0 < sum_of(answer.first_token) <= answer.wall_s
    assert names[-1] == "apply"
