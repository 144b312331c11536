"""Prompt outputs through the scheduler: each position is delivered once."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel
from simulator.workers.prompt_outputs import hidden_of, logprob_of
from tests.scheduler_svc.conftest import start_again
from wire.columns import UINT32, pack, unpack

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
LAST, MEAN = types_pb2.POOLING_LAST, types_pb2.POOLING_MEAN
TINY = FakeModel(num_blocks=17, block_size=4, max_model_len=64, max_num_batched_tokens=64)


def prompt_of(index: int, length: int) -> list[int]:
    """A prompt; those of one family share their first half."""
    return [(7 * i + (i > length // 2) * index) % 32000 for i in range(1, length + 1)]


def request(prompt: list[int], pooling: Any = None, **sampling: Any) -> Any:
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=prompt,
        sampling=types_pb2.SamplingParams(**sampling),
        pooling=pooling or types_pb2.POOLING_UNSPECIFIED,
    )


@dataclass
class Answer:
    """The messages that one caller received."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    last: Any = None


async def generate(stub: Any, wanted: Any) -> Answer:
    answer = Answer()
    async for answer.last in stub.Generate(wanted):
        assert not (answer.token_ids and answer.last.prompt_logprobs), "told too late"
        answer.token_ids += answer.last.token_ids
        answer.prompt_logprobs += answer.last.prompt_logprobs
    return answer


def check_logprobs(answer: Answer, prompt: list[int], num_top: int) -> None:
    """Checks the values, which the fake worker derives from the token, so that mix-ups show."""
    values, ranks = logprob_of(np.array(prompt[1:]))
    assert [token.logprob for token in answer.prompt_logprobs] == values.tolist()
    assert [token.rank for token in answer.prompt_logprobs] == ranks.tolist()
    for token, token_id in zip(answer.prompt_logprobs, prompt[1:], strict=True):
        assert list(token.top_token_ids) == [(token_id + i) % 32000 for i in range(num_top)]


def check_hidden(answer: Answer, prompt: list[int], pooling: Any) -> None:
    states = hidden_of(np.array(prompt), 0).astype(np.float64)
    expected = states[-1] if pooling == LAST else states.mean(0)
    assert list(answer.last.hidden) == pytest.approx(expected.tolist(), abs=1e-6)
    assert answer.token_ids == []
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    usage = answer.last.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 0)


async def ask_everything(stub: Any, num_rounds: int = 3) -> None:
    """Runs scores, embeddings and plain requests at once, on prompts with common prefixes."""
    lengths = [1, 2, 5, 17, 30, 41]
    prompts = [prompt_of(i, length) for i, length in enumerate(lengths * num_rounds)]
    asked = []
    for i, prompt in enumerate(prompts):
        asked += [
            request(prompt, max_tokens=i % 4, prompt_logprobs=i % 3, seed=i),
            request(prompt, MEAN),
            request(prompt, LAST, max_tokens=0),
            request(prompt, max_tokens=5, seed=i),
        ]
    answers = await asyncio.gather(*(generate(stub, one) for one in asked))
    for i, prompt in enumerate(prompts):
        scored, mean, last, plain = answers[4 * i : 4 * i + 4]
        check_logprobs(scored, prompt, i % 3)
        assert len(scored.token_ids) == i % 4
        check_hidden(mean, prompt, MEAN)
        check_hidden(last, prompt, LAST)
        assert len(plain.token_ids) == 5 and not plain.prompt_logprobs


@pytest.mark.parametrize("lookahead", [0, 1, 2])
async def test_every_position_is_told_once_through_chunks_hits_and_preemptions(
    make_cluster: MakeCluster, lookahead: int
) -> None:
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 13, "lookahead": lookahead}
    async with make_cluster(TINY, **options) as cluster:
        await ask_everything(cluster.scheduler)
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    assert status.num_preemptions > 0
    assert status.prefix_hit_tokens > 0
    assert status.num_free_blocks == status.num_blocks


async def test_every_position_is_told_once_though_workers_are_lost(
    make_cluster: MakeCluster,
) -> None:
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 13}
    async with make_cluster(TINY, StepTime(base_s=0.002), **options) as cluster:
        asking = asyncio.create_task(ask_everything(cluster.scheduler, num_rounds=6))
        server = cluster.worker_server
        for num_steps in (10, 40):
            await cluster.until(lambda: cluster.worker.num_steps > num_steps)  # noqa: B023
            await server.stop(None)
            await cluster.until(lambda: not cluster.engine.is_ready)
            server = await start_again(cluster.worker, cluster.worker_port)
        await asking
        await server.stop(None)


async def test_whoever_asks_computes_a_cached_prompt_anew_and_says_so(
    make_cluster: MakeCluster,
) -> None:
    prompt = prompt_of(1, 40)
    async with make_cluster() as cluster:
        stub = cluster.scheduler
        for wanted, num_cached in (
            (request(prompt, max_tokens=1), 0),
            (request(prompt, max_tokens=1), 32),
            (request(prompt, max_tokens=1, prompt_logprobs=0), 0),
            (request(prompt, MEAN), 0),
            (request(prompt, LAST), 32),
            (request(prompt, max_tokens=0), 32),
        ):
            answer = await generate(stub, wanted)
            assert answer.last.usage.cached_tokens == num_cached


async def test_a_prompt_that_fills_the_model_can_be_scored_and_embedded(
    make_cluster: MakeCluster,
) -> None:
    prompt = prompt_of(3, 64)
    async with make_cluster(TINY, max_num_batched_tokens=64) as cluster:
        stub = cluster.scheduler
        check_hidden(await generate(stub, request(prompt, MEAN)), prompt, MEAN)
        scored = await generate(stub, request(prompt, prompt_logprobs=1, max_tokens=0))
        check_logprobs(scored, prompt, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="at most 63 leave room for output"):
            await generate(stub, request(prompt, max_tokens=1))


async def test_a_session_hears_of_its_prompts_by_handle(make_cluster: MakeCluster) -> None:
    async with make_cluster(max_num_batched_tokens=64) as cluster:
        call = cluster.scheduler.Session()
        lengths = {7: 150, 9: 20}
        for handle, length in lengths.items():
            submit = scheduler_pb2.Submit(
                handle=handle,
                request_id=f"r{handle}",
                prompt_token_ids=pack(prompt_of(handle, length)),
                sampling=types_pb2.SamplingParams(max_tokens=2, prompt_logprobs=handle % 4),
            )
            await call.write(scheduler_pb2.SessionRequest(submit=submit))
        told: dict[int, list[Any]] = {7: [], 9: []}
        ended: set[int] = set()
        while len(ended) < 2:
            response = await call.read()
            for report in response.prompt_outputs:
                told[report.owner].append(report)
            ended |= {finished.handle for finished in response.finished}
            for handle in unpack(response.handles, UINT32).tolist():
                assert sum(report.count for report in told[handle]) == lengths[handle] - 1
        call.cancel()
    assert len(told[7]) >= 2  # it took several steps
    assert [report.begin for report in told[7]] == [
        sum(before.count for before in told[7][:i]) for i in range(len(told[7]))
    ]


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("prompt_logprobs", request([1], prompt_logprobs=21)),
        ("prompt_logprobs", request([1], MEAN, prompt_logprobs=0)),
        ("max_tokens", request([1], LAST, max_tokens=1)),
        ("pooling", request([1], 7)),
    ],
)
async def test_a_question_that_cannot_be_asked_is_refused_by_name(
    make_cluster: MakeCluster, field: str, wanted: Any
) -> None:
    async with make_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match=field) as refusal:
            await generate(cluster.scheduler, wanted)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_report_that_is_not_finite_fails_its_own_request(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        worker, broken, whole = cluster.worker, prompt_of(1, 30), prompt_of(2, 30)
        answer = worker._answer

        async def spoiled(step: Any) -> Any:
            output = await answer(step)
            for new in step.new_sequences:
                if unpack(new.token_ids).tolist() == broken:
                    for report in output.prompt_outputs:
                        if report.owner == new.slot:
                            report.not_finite = True
            return output

        worker._answer = spoiled
        answers = await asyncio.gather(
            generate(cluster.scheduler, request(broken, MEAN)),
            generate(cluster.scheduler, request(whole, MEAN)),
            return_exceptions=True,
        )
    assert isinstance(answers[0], grpc.aio.AioRpcError)
    assert "not finite" in str(answers[0].details())
    assert isinstance(answers[1], Answer)
    check_hidden(answers[1], whole, MEAN)


async def test_a_report_that_nobody_asked_for_loses_the_step_and_not_the_request(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        worker, prompt = cluster.worker, prompt_of(1, 30)
        answer = worker._answer

        async def spoiled(step: Any) -> Any:
            output = await answer(step)
            output.prompt_outputs[0].owner += 1
            worker._answer = answer  # once
            return output

        worker._answer = spoiled
        found = await generate(cluster.scheduler, request(prompt, prompt_logprobs=2, max_tokens=3))
        num_recoveries = cluster.engine.groups[0].num_recoveries
    assert num_recoveries == 1
    check_logprobs(found, prompt, 2)


async def test_the_debug_view_names_the_question(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.003)) as cluster:
        wanted = request([1, 2], prompt_logprobs=3, max_tokens=4000)
        wanted.request_id = "a"
        call = cluster.scheduler.Generate(wanted)
        await call.read()
        asked = debug_pb2.DescribeRequestRequest(request_id="a")
        described = await cluster.debug.DescribeRequest(asked)
        call.cancel()
    assert "prompt_logprobs 3" in described.sampling
