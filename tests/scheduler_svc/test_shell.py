"""The scheduler's gRPC shell against a fake worker: streams, refusals, aborts, recovery."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import numpy as np
import pytest

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from simulator.workers.fake_worker import FakeModel
from simulator.workers.slots import token_at
from tests.pace import patience
from tests.scheduler_svc.conftest import start_again
from wire.columns import UINT32, pack, unpack

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]
Generate = scheduler_pb2.SchedulerServiceGenerateRequest


def params(max_tokens: int = 8, seed: int = 7, **more: Any) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, **more)


def expected(seed: int, num_prompt: int, num_output: int, vocab_size: int = 32000) -> list[int]:
    positions = np.arange(num_prompt, num_prompt + num_output)
    return token_at(np.full(num_output, seed, dtype=np.uint64), positions, vocab_size).tolist()


async def generate(stub: Any, request: scheduler_pb2.SchedulerServiceGenerateRequest) -> Any:
    """(tokens, last message) of a request."""
    token_ids: list[int] = []
    response = None
    async for response in stub.Generate(request):
        token_ids += response.token_ids
    return token_ids, response


async def refusal(stub: Any, request: scheduler_pb2.SchedulerServiceGenerateRequest) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, request)
    return caught.value


@pytest.mark.parametrize("lookahead", [0, 1, 2])
async def test_a_generation_has_the_workers_tokens_in_order(
    make_cluster: MakeCluster, lookahead: int
) -> None:
    async with make_cluster(lookahead=lookahead) as cluster:
        request = Generate(prompt_token_ids=range(1, 40), sampling=params(max_tokens=20))
        token_ids, last = await generate(cluster.scheduler, request)
    assert token_ids == expected(7, 39, 20)
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (39, 20)


async def test_forty_streams_at_once_do_not_mix(make_cluster: MakeCluster) -> None:
    async with make_cluster(max_num_seqs=16, max_num_batched_tokens=64) as cluster:
        requests = [
            Generate(prompt_token_ids=range(1, 3 + i), sampling=params(10 + i, seed=i))
            for i in range(40)
        ]
        answers = await asyncio.gather(*(generate(cluster.scheduler, r) for r in requests))
    for i, (token_ids, _) in enumerate(answers):
        assert token_ids == expected(i, 2 + i, 10 + i)


async def test_a_small_pool_preempts_and_loses_nothing(make_cluster: MakeCluster) -> None:
    model = FakeModel(num_blocks=9, block_size=4, max_model_len=32)
    async with make_cluster(model, max_num_seqs=4) as cluster:
        requests = [
            Generate(prompt_token_ids=range(1, 5), sampling=params(24, seed=i)) for i in range(4)
        ]
        answers = await asyncio.gather(*(generate(cluster.scheduler, r) for r in requests))
        status = await cluster.scheduler.GetStatus(scheduler_pb2.GetStatusRequest())
    for i, (token_ids, _) in enumerate(answers):
        assert token_ids == expected(i, 4, 24)
    assert status.num_preemptions > 0
    assert status.num_free_blocks == status.num_blocks == 8
    assert status.attention_backend == status.groups[0].attention_backend == "none"
    assert status.all_reduce == status.groups[0].all_reduce == "none"
    assert status.kv_cache_dtype == status.groups[0].kv_cache_dtype == "float32"


async def test_the_second_of_two_equal_prompts_reports_cached_tokens(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        request = Generate(prompt_token_ids=range(1, 101), sampling=params())
        first, first_end = await generate(cluster.scheduler, request)
        second, second_end = await generate(cluster.scheduler, request)
        exact = Generate(prompt_token_ids=range(1, 97), sampling=params())
        _, exact_end = await generate(cluster.scheduler, exact)
    assert first == second
    assert first_end.usage.cached_tokens == 0
    assert second_end.usage.cached_tokens == 96
    assert exact_end.usage.cached_tokens == 80  # a whole-block hit excludes the last block


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "names"),
    [
        ([], {}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids"),
        ([32000], {}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids"),
        ([2**32 - 1], {}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids"),
        ([1] * 8192, {}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids"),
        ([1], {"temperature": 2.1}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ([1], {"temperature": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ([1], {"top_p": 0.0}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ([1], {"top_k": -2}, grpc.StatusCode.INVALID_ARGUMENT, "top_k"),
        ([1], {"min_p": 1.5}, grpc.StatusCode.INVALID_ARGUMENT, "min_p"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, grpc.StatusCode.INVALID_ARGUMENT, "min_tokens"),
        ([1], {"stop_token_ids": [32000]}, grpc.StatusCode.INVALID_ARGUMENT, "stop_token_ids"),
        ([1], {"stop_token_ids": [5] * 129}, grpc.StatusCode.INVALID_ARGUMENT, "stop_token_ids"),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_nothing_is_lost(
    make_cluster: MakeCluster,
    prompt: list[int],
    sampling: dict[str, Any],
    code: grpc.StatusCode,
    names: str,
) -> None:
    async with make_cluster() as cluster:
        bad = Generate(prompt_token_ids=prompt, sampling=types_pb2.SamplingParams(**sampling))
        error = await refusal(cluster.scheduler, bad)
        assert error.code() is code
        assert names in error.details()
        token_ids, _ = await generate(
            cluster.scheduler, Generate(prompt_token_ids=[1], sampling=params())
        )
    assert token_ids == expected(7, 1, 8)


async def test_a_request_that_can_never_fit_is_refused_at_once(make_cluster: MakeCluster) -> None:
    async with make_cluster(FakeModel(num_blocks=4, max_model_len=4096)) as cluster:
        error = await refusal(cluster.scheduler, Generate(prompt_token_ids=[1] * 60))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "KV blocks" in error.details()


async def test_a_cancelled_call_frees_its_blocks(make_cluster: MakeCluster) -> None:
    # Without grants, whose steps are counted as they are computed: those in flight would count.
    async with make_cluster(step_time=StepTime(base_s=0.002), max_grant=0) as cluster:
        call = cluster.scheduler.Generate(
            Generate(prompt_token_ids=range(1, 100), sampling=params(4000))
        )
        await call.read()
        core = cluster.core
        assert core.view.num_free_blocks < core.view.num_blocks
        call.cancel()
        await cluster.until(lambda: core.num_running == 0)
        steps = core.counters.num_steps
        await cluster.until(lambda: core.view.num_free_blocks == 4095)
        assert core.counters.num_steps - steps <= 2


class Gateway:
    """The client side of a Session: submits requests and sorts messages by handle."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Session()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, scheduler_pb2.Finished] = {}
        self.reading = asyncio.create_task(self._read())

    async def submit(
        self, handle: int, num_prompt: int, sampling: types_pb2.SamplingParams
    ) -> None:
        submit = scheduler_pb2.Submit(
            handle=handle,
            request_id=f"request-{handle}",
            prompt_token_ids=pack(list(range(1, num_prompt + 1))),
            sampling=sampling,
        )
        await self.call.write(scheduler_pb2.SessionRequest(submit=submit))

    async def _read(self) -> None:
        async for response in self.call:
            handles = unpack(response.handles, UINT32).tolist()
            for handle, token in zip(handles, unpack(response.token_ids).tolist(), strict=True):
                assert handle not in self.ends
                self.tokens.setdefault(handle, []).append(token)
            for end in response.finished:
                self.ends[end.handle] = end

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)


async def test_one_session_carries_many_requests_and_refuses_one_alone(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        gateway = Gateway(cluster.scheduler)
        for handle in range(20):
            await gateway.submit(handle, 5 + handle, params(12, seed=handle))
        await gateway.submit(99, 5, params(12, top_p=3.0))
        await cluster.until(lambda: len(gateway.ends) == 21)
        await gateway.close()
    for handle in range(20):
        assert gateway.tokens[handle] == expected(handle, 5 + handle, 12)
    assert gateway.ends[99].status_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "top_p" in gateway.ends[99].message


async def test_a_session_that_ends_aborts_its_requests(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.002)) as cluster:
        gateway = Gateway(cluster.scheduler)
        for handle in range(5):
            await gateway.submit(handle, 20, params(4000))
        core = cluster.core
        await cluster.until(lambda: len(gateway.tokens) == 5)
        await gateway.call.write(
            scheduler_pb2.SessionRequest(abort=scheduler_pb2.AbortHandle(handle=0))
        )
        await cluster.until(lambda: core.num_running == 4)
        await gateway.close()
        await cluster.until(lambda: core.num_running == 0)
        await cluster.until(lambda: core.view.num_free_blocks == 4095)


async def test_abort_by_id_tells_the_requests_own_client(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.002)) as cluster:
        call = cluster.scheduler.Generate(
            Generate(request_id="mine", prompt_token_ids=[1, 2], sampling=params(4000))
        )
        await call.read()
        answer = await cluster.scheduler.Abort(
            scheduler_pb2.AbortRequest(request_ids=["mine", "missing"])
        )
        response = last = await call.read()
        while response is not grpc.aio.EOF:
            last, response = response, await call.read()
    assert list(answer.aborted) == ["mine"]
    assert last.finish_reason == types_pb2.FINISH_REASON_ABORT


async def test_a_live_request_id_is_taken(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.002)) as cluster:
        request = Generate(request_id="twin", prompt_token_ids=[1], sampling=params(4000))
        call = cluster.scheduler.Generate(request)
        await call.read()
        error = await refusal(cluster.scheduler, request)
        call.cancel()
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_streams_survive_the_death_of_the_worker(make_cluster: MakeCluster) -> None:
    async with make_cluster(step_time=StepTime(base_s=0.002)) as cluster:
        calls = [
            asyncio.create_task(
                generate(
                    cluster.scheduler,
                    Generate(prompt_token_ids=range(1, 20), sampling=params(200, seed=i)),
                )
            )
            for i in range(8)
        ]
        await cluster.until(lambda: cluster.core.num_output_tokens > 100)
        await cluster.worker_server.stop(None)
        await cluster.until(lambda: not cluster.engine.is_ready)
        server = await start_again(cluster.worker, cluster.worker_port)
        answers = await asyncio.wait_for(asyncio.gather(*calls), patience(20))
        num_recoveries = cluster.engine.groups[0].num_recoveries
        await server.stop(None)
    for i, (token_ids, _) in enumerate(answers):
        assert token_ids == expected(i, 19, 200)
    assert num_recoveries == 1


async def test_a_failed_step_is_done_again(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        cluster.worker.fail_steps = 1
        token_ids, _ = await generate(
            cluster.scheduler, Generate(prompt_token_ids=[1, 2, 3], sampling=params())
        )
    assert token_ids == expected(7, 3, 8)


async def test_a_step_answered_with_too_few_tokens_is_done_again(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        cluster.worker.short_steps = 1
        token_ids, _ = await generate(
            cluster.scheduler, Generate(prompt_token_ids=[1, 2, 3], sampling=params())
        )
        assert cluster.engine.groups[0].num_recoveries == 1
    assert token_ids == expected(7, 3, 8)


async def test_a_request_whose_step_always_fails_is_given_up(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        cluster.worker.fail_steps = 10**6
        error = await refusal(cluster.scheduler, Generate(prompt_token_ids=[1], sampling=params()))
        cluster.worker.fail_steps = 0
        token_ids, _ = await generate(
            cluster.scheduler, Generate(prompt_token_ids=[1], sampling=params())
        )
    assert error.code() is grpc.StatusCode.ABORTED
    assert "2 processes in a row died" in error.details() and "planned failure" in error.details()
    assert token_ids == expected(7, 1, 8)


async def test_before_the_first_worker_requests_are_unavailable(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        cluster.engine.groups[0].core = None
        error = await refusal(cluster.scheduler, Generate(prompt_token_ids=[1]))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_debug_service_tells_requests_blocks_and_steps(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(
        step_time=StepTime(base_s=0.003), max_num_seqs=2, max_num_batched_tokens=16
    ) as cluster:
        calls = []
        for i in range(3):
            request = Generate(
                request_id=f"r{i}", prompt_token_ids=range(1, 40), sampling=params(4000, seed=i)
            )
            calls.append(cluster.scheduler.Generate(request))
            await cluster.until(lambda: cluster.core.num_accepted == len(calls))
            if i < 2:
                await calls[i].read()  # it decodes while the next prompt is computed
        listed = await cluster.debug.ListRequests(debug_pb2.ListRequestsRequest())
        described = await cluster.debug.DescribeRequest(
            debug_pb2.DescribeRequestRequest(request_id="r1")
        )
        waits = await cluster.debug.DescribeRequest(
            debug_pb2.DescribeRequestRequest(request_id="r2")
        )
        pool = await cluster.debug.DumpBlockPool(debug_pb2.DumpBlockPoolRequest())
        steps = await cluster.debug.ListSteps(debug_pb2.ListStepsRequest(limit=1000))
        for call in calls:
            call.cancel()
    assert {r.request_id: r.state for r in listed.requests} == {
        "r0": "running",
        "r1": "running",
        "r2": "waiting",
    }
    assert "entered slot" in described.story[0]
    assert described.block_ids
    assert "max_num_seqs" in waits.story[-1]
    shared = [b for b in pool.blocks if b.ref_count == 2]
    assert len(shared) == 2  # 39 prompt tokens share two full blocks of 16
    assert {tuple(b.request_ids) for b in shared} == {("r0", "r1")}
    assert any(s.num_prefill_rows and s.num_decode_rows for s in steps.steps)


async def test_a_scheduler_with_a_higher_epoch_fences_the_older_one(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster() as cluster:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{cluster.worker_port}")
        async with channel:
            attach = channel.stream_stream(
                "/pagewire.v1.WorkerService/Attach",
                request_serializer=worker_pb2.AttachRequest.SerializeToString,
                response_deserializer=worker_pb2.AttachResponse.FromString,
            )()
            hello = worker_pb2.Hello(protocol_version=2, epoch=99, first_step_id=1)
            await attach.write(worker_pb2.AttachRequest(hello=hello))
            await attach.read()
            call = cluster.scheduler.Generate(Generate(prompt_token_ids=[1], sampling=params()))
            await cluster.until(lambda: not cluster.engine.is_ready)
            call.cancel()
            attach.cancel()
    assert "stopping" in cluster.engine.reason


async def test_an_idle_worker_holds_no_request(make_cluster: MakeCluster) -> None:
    async with make_cluster() as cluster:
        await generate(cluster.scheduler, Generate(prompt_token_ids=[1, 2], sampling=params()))
        await cluster.until(lambda: cluster.worker._slots.num_live == 0)
