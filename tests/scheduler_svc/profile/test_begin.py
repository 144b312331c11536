"""A recording that begins in the middle of a step."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.observe.step_profile import LoopProfile
from scheduler_svc.worker.link import WorkerLink


async def test_the_step_that_is_awaited_when_it_begins_is_in_it(
    make_cluster: Callable[..., AbstractAsyncContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker records it: it computes the step after it was asked to record."""
    profile, answered = LoopProfile(), []
    async with make_cluster() as cluster:
        receive = WorkerLink.receive

        async def receive_meanwhile(link: WorkerLink) -> Any:
            answer = await receive(link)
            cluster.engine.groups[0].profile = profile
            answered.append(answer.step_id)
            return answer

        monkeypatch.setattr(WorkerLink, "receive", receive_meanwhile)
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            prompt_token_ids=[1, 2, 3], sampling=types_pb2.SamplingParams(max_tokens=4)
        )
        async for _ in cluster.scheduler.Generate(request):
            pass
    assert list(profile.steps) == answered and len(answered) >= 4
