"""Log probabilities through the scheduler: each arrives with its own token."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel
from simulator.workers.prompt_outputs import logprob_of
from tests.scheduler_svc.conftest import start_again

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]


def request(index: int, max_tokens: int, num_top: int | None) -> Any:
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, seed=index, logprobs=num_top)
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=range(1, 5), sampling=sampling
    )


async def generate(stub: Any, wanted: Any) -> tuple[list[int], list[types_pb2.TokenLogprobs]]:
    token_ids: list[int] = []
    logprobs: list[types_pb2.TokenLogprobs] = []
    async for response in stub.Generate(wanted):
        token_ids += response.token_ids
        logprobs += response.logprobs
    return token_ids, logprobs


def check(token_ids: list[int], logprobs: list[types_pb2.TokenLogprobs], num_top: int) -> None:
    """Checks the values, which the fake worker derives from the token, so that mix-ups show."""
    values, ranks = logprob_of(np.array(token_ids))
    assert [token.logprob for token in logprobs] == values.tolist()
    assert [token.rank for token in logprobs] == ranks.tolist()
    for token, token_id in zip(logprobs, token_ids, strict=True):
        assert list(token.top_token_ids) == [(token_id + i) % 32000 for i in range(num_top)]
        assert len(token.top_logprobs) == num_top


@pytest.mark.parametrize("lookahead", [0, 1, 2])
async def test_a_tokens_logprobs_survive_preemptions(
    make_cluster: MakeCluster, lookahead: int
) -> None:
    model = FakeModel(num_blocks=9, block_size=4, max_model_len=32)
    asks = [2, None, 0, 20]
    async with make_cluster(model, max_num_seqs=4, lookahead=lookahead) as cluster:
        wanted = [request(i, 24, num_top) for i, num_top in enumerate(asks)]
        answers = await asyncio.gather(*(generate(cluster.scheduler, w) for w in wanted))
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    assert status.num_preemptions > 0
    for (token_ids, logprobs), num_top in zip(answers, asks, strict=True):
        assert len(token_ids) == 24
        if num_top is None:
            assert not logprobs
        else:
            check(token_ids, logprobs, num_top)


async def test_a_tokens_logprobs_survive_a_lost_worker(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.002)) as cluster:
        calls = [
            asyncio.create_task(generate(cluster.scheduler, request(i, 60, i))) for i in range(5)
        ]
        await cluster.until(lambda: cluster.core.num_output_tokens > 100)
        await cluster.worker_server.stop(None)
        await cluster.until(lambda: not cluster.engine.is_ready)
        server = await start_again(cluster.worker, cluster.worker_port)
        answers = await asyncio.gather(*calls)
        await server.stop(None)
    for num_top, (token_ids, logprobs) in enumerate(answers):
        assert len(token_ids) == 60
        check(token_ids, logprobs, num_top)


async def test_named_tokens_are_told_in_place_of_the_likeliest(make_cluster: MakeCluster) -> None:
    """Next to requests that ask for others, in the order of the request."""
    asks: list[dict[str, Any]] = [
        {"logprobs": 0, "logprob_token_ids": [31999, 5, 9]},
        {"logprobs": 7},
        {"logprobs": 2, "logprob_token_ids": [4]},
    ]
    async with make_cluster(step_time=StepTime(base_s=0.002)) as cluster:
        wanted = [
            scheduler_pb2.SchedulerServiceGenerateRequest(
                prompt_token_ids=range(1, 5),
                sampling=types_pb2.SamplingParams(max_tokens=12, seed=seed, **fields),
            )
            for seed, fields in enumerate(asks)
        ]
        answers = await asyncio.gather(*(generate(cluster.scheduler, one) for one in wanted))
    check(*answers[1], num_top=7)
    for place, named in ((0, [31999, 5, 9]), (2, [4])):
        token_ids, told = answers[place]
        values, _ = logprob_of(np.array(named))
        assert len(told) == len(token_ids) == 12
        assert [list(token.top_token_ids) for token in told] == [named] * 12
        assert [list(token.top_logprobs) for token in told] == [values.tolist()] * 12


async def test_columns_that_do_not_fit_lose_the_step_and_not_the_request(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        worker = cluster.worker
        answer = worker._answer

        async def spoiled(step: Any) -> Any:
            output = await answer(step)
            output.logprobs.ranks += b"\0"
            worker._answer = answer  # once
            return output

        worker._answer = spoiled
        token_ids, logprobs = await generate(cluster.scheduler, request(3, 10, 1))
        num_recoveries = cluster.engine.groups[0].num_recoveries
    assert num_recoveries == 1
    assert len(token_ids) == 10
    check(token_ids, logprobs, 1)


BIAS = types_pb2.LogitBias
WORD = types_pb2.TokenSequence


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("repetition_penalty", {"repetition_penalty": 1e-46}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("logit_bias", {"logit_bias": [BIAS(token_id=32000)]}),
        ("logit_bias", {"logit_bias": [BIAS(token_id=1, bias=100.5)]}),
        ("logit_bias", {"logit_bias": [BIAS(token_id=1), BIAS(token_id=1)]}),
        ("logit_bias", {"logit_bias": [BIAS(token_id=i) for i in range(1025)]}),
        ("allowed_token_ids", {"allowed_token_ids": [32000]}),
        ("allowed_token_ids", {"allowed_token_ids": range(16385)}),
        (
            "allowed_token_ids",
            {"allowed_token_ids": [5], "bad_words_token_ids": [WORD(token_ids=[5])]},
        ),
        ("bad_words_token_ids", {"bad_words_token_ids": [WORD()]}),
        ("bad_words_token_ids", {"bad_words_token_ids": [WORD(token_ids=[1, 32000])]}),
        ("bad_words_token_ids", {"bad_words_token_ids": [WORD(token_ids=[1] * 257)]}),
        ("logprobs", {"logprobs": 129}),
        ("logprob_token_ids", {"logprobs": 0, "logprob_token_ids": [32000]}),
        ("logprob_token_ids", {"logprobs": 0, "logprob_token_ids": range(129)}),
        ("logprob_token_ids", {"logprob_token_ids": [5]}),
    ],
)
async def test_a_rule_out_of_range_is_refused_by_name(
    make_cluster: MakeCluster, field: str, params: dict[str, Any]
) -> None:
    async with make_cluster() as cluster:
        wanted = scheduler_pb2.SchedulerServiceGenerateRequest(
            prompt_token_ids=[1], sampling=types_pb2.SamplingParams(**params)
        )
        with pytest.raises(Exception, match=field) as refusal:
            await generate(cluster.scheduler, wanted)
    assert refusal.value.code().name == "INVALID_ARGUMENT"


async def test_the_debug_view_names_rules_and_counts_their_tokens(
    make_cluster: MakeCluster,
) -> None:
    sampling = types_pb2.SamplingParams(
        presence_penalty=0.5,
        logit_bias=[BIAS(token_id=4567, bias=1)],
        bad_words_token_ids=[WORD(token_ids=[4567]), WORD(token_ids=[1])],
        logprobs=3,
        logprob_token_ids=[4567],
        max_tokens=4000,
        seed=1,  # the view has it, and one that is drawn may have any digits
    )
    async with make_cluster(step_time=StepTime(base_s=0.003)) as cluster:
        wanted = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id="a", prompt_token_ids=[1], sampling=sampling
        )
        call = cluster.scheduler.Generate(wanted)
        await call.read()
        asked = debug_pb2.DescribeRequestRequest(request_id="a")
        described = await cluster.debug.DescribeRequest(asked)
        call.cancel()
    words = (
        "presence_penalty 0.5, 1 biased tokens, 2 bad words, 1 tokens with log probabilities, "
        "logprobs 3"
    )
    assert words in described.sampling
    assert "4567" not in described.sampling
