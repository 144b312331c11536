"""Hints about sessions over the wire: they reach the core, and change no answer."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.core import CachePolicy
from wire.columns import pack

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
Generate = scheduler_pb2.SchedulerServiceGenerateRequest


def submit(handle: int, **hint: Any) -> scheduler_pb2.SessionRequest:
    return scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=handle,
            request_id=f"r{handle}",
            prompt_token_ids=pack([*range(1, 101)]),
            sampling=types_pb2.SamplingParams(max_tokens=1),
            session=types_pb2.SessionHint(**hint),
            cache_salt="red",
        )
    )


async def test_a_session_is_known_by_its_name_until_its_client_ends_it(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(lookahead=0, cache_policy=CachePolicy.SESSIONS) as cluster:
        stream = cluster.scheduler.Session()
        for handle, hint in enumerate([{"session_id": "a", "ttl_s": 60.0}, {"session_id": "b"}]):
            await stream.write(submit(handle, **hint))
            while not (await stream.read()).finished:
                pass
        pool = cluster.engine.groups[0].core.internal_state.sessions
        asked = scheduler_pb2.GetStatusRequest(most_sessions=1)
        status = await cluster.scheduler.GetStatus(asked)
        (newest,) = status.sessions
        assert (newest.session_id, newest.num_turns) == ("b", 1)
        assert (newest.num_prompt_tokens, newest.num_found_tokens) == (100, 96)
        assert newest.worker_address == cluster.engine.groups[0].address
        assert status.cache_policy == "sessions"
        unasked = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
        assert not unasked.sessions
        assert pool.named.branch_of(("red", "a")) and pool.named.branch_of(("red", "b"))
        ended = scheduler_pb2.EndSession(session_id="b", cache_salt="red")
        await stream.write(scheduler_pb2.SessionRequest(end_session=ended))
        await cluster.until(lambda: not pool.named.branch_of(("red", "b")))
        assert pool.named.branch_of(("red", "a"))
        await stream.done_writing()


@pytest.mark.parametrize(
    ("hint", "names"),
    [
        ({"session_id": "ä" * 33}, "session_id"),
        ({"parent_session_id": "x" * 65}, "parent_id"),
        ({"prefix_key": "x" * 65}, "prefix_key"),
        ({"ttl_s": -0.5}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
    ],
)
async def test_a_hint_out_of_bounds_is_refused_by_name(
    make_cluster: MakeCluster, hint: dict[str, Any], names: str
) -> None:
    async with make_cluster() as cluster:
        request = Generate(prompt_token_ids=[1, 2], session=types_pb2.SessionHint(**hint))
        with pytest.raises(grpc.aio.AioRpcError, match=names) as refused:
            assert [response async for response in cluster.scheduler.Generate(request)]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("policy", list(CachePolicy))
async def test_hints_change_no_answer(make_cluster: MakeCluster, policy: CachePolicy) -> None:
    async with make_cluster(cache_policy=policy) as cluster:
        answers = []
        for hint in (None, types_pb2.SessionHint(session_id="a", ttl_s=0.0)):
            request = Generate(
                prompt_token_ids=range(1, 40),
                sampling=types_pb2.SamplingParams(max_tokens=5, seed=1),
                session=hint,
            )
            parts = [response async for response in cluster.scheduler.Generate(request)]
            answers.append([token for part in parts for token in part.token_ids])
    assert answers[0] == answers[1] and len(answers[0]) == 5
