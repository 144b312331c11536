"""A scheduler with a real worker: equal tokens at any depth, with grants, when disturbed."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.core import Preemption
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from tests.pace import patience
from tests.scheduler_svc.conftest import service_config
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, make_prompt, serving
from wire.server import SERVER_OPTIONS, bind

pytestmark = pytest.mark.usefixtures("any_step_is_granted")
NUM_BLOCKS = 13  # of 16 tokens; a batch of four needs about 20 at its end
NUM_HOST_BLOCKS = 9  # enough to swap out one sequence, not two
Generate = scheduler_pb2.SchedulerServiceGenerateRequest
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 0.0, "min_tokens": 50, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 6, "top_k": 20, "stop_token_ids": [5, 9, 11, 30]},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05},
]


@dataclass(frozen=True, slots=True)
class Seen:
    """Outputs of a request as seen by a client."""

    token_ids: tuple[int, ...]
    finish_reason: int
    logprobs: tuple[float, ...]


@pytest.fixture(scope="module")
def small_worker(llama_folder: Path) -> Iterator[Worker]:
    """A worker with a cache that is too small for its slots."""
    config = replace(WORKER_CONFIG, num_kv_blocks=NUM_BLOCKS, host_blocks=NUM_HOST_BLOCKS)
    with serving(config, llama_folder) as ready:
        yield ready


async def serve(
    worker: Worker,
    disturb: Callable[[Engine, Any], Any] | None = None,
    wanted: Sequence[tuple[int, list[int], str]] | None = None,
    **options: object,
) -> tuple[list[Seen], Engine]:
    """Runs all requests, each (number, prompt, fork group), on a scheduler of its own."""
    if wanted is None:
        wanted = [(n, make_prompt(9 + n, seed=n % 3), "") for n in range(len(SAMPLINGS))]
    engine = Engine(service_config(worker.server.port, max_num_seqs=4, **options))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerService(engine), server)
    port = bind(server, "127.0.0.1:0", "test")
    await server.start()
    running = asyncio.create_task(engine.run())
    try:
        async with (
            asyncio.timeout(patience(60)),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while not engine.is_ready:
                await asyncio.sleep(0.01)
            calls = [asyncio.create_task(ask(stub, *one)) for one in wanted]
            if disturb is not None:
                await disturb(engine, stub)
            return await asyncio.gather(*calls), engine
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def ask(stub: Any, number: int, prompt: list[int], fork_group: str) -> Seen:
    sampling = types_pb2.SamplingParams(max_tokens=70 + 5 * number, **SAMPLINGS[number])
    token_ids: list[int] = []
    logprobs: list[float] = []
    reason = 0
    request = Generate(
        request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling, fork_group=fork_group
    )
    async for response in stub.Generate(request):
        token_ids += response.token_ids
        logprobs += [entry.logprob for entry in response.logprobs]
        reason = response.finish_reason
    return Seen(tuple(token_ids), reason, tuple(round(value, 3) for value in logprobs))


@pytest.fixture(scope="module")
def calm(small_worker: Worker) -> list[Seen]:
    """Outputs with one step at a time."""
    seen, _ = asyncio.run(serve(small_worker, lookahead=0, max_grant=0))
    return seen


def num_granted(engine: Engine) -> int:
    (group,) = engine.groups
    return sum(r.plan.grant_id is not None for r in group.trace.newest_first())


@pytest.mark.parametrize(
    ("lookahead", "max_grant"), [(1, 0), (2, 0), (0, 8), (1, 3), (1, 8), (2, 16)]
)
async def test_every_depth_gives_the_same_tokens(
    small_worker: Worker, calm: list[Seen], lookahead: int, max_grant: int
) -> None:
    seen, engine = await serve(
        small_worker, lookahead=lookahead, max_grant=max_grant, state_check_interval=3
    )
    assert seen == calm
    (group,) = engine.groups
    assert group.core.view.num_preemptions > 0
    assert group.num_recoveries == 0
    assert group.state_check.num_compared > 5
    assert (num_granted(engine) > 10) is (max_grant > 0)


async def test_a_worker_lost_in_the_middle_of_a_grant_changes_no_token(
    small_worker: Worker, calm: list[Seen]
) -> None:
    async def lose_it(engine: Engine, _: Any) -> None:
        (group,) = engine.groups
        while group.core.num_in_flight < 4:
            await asyncio.sleep(0.001)
        session = small_worker.server._session
        session.end(session._stream, None)

    seen, engine = await serve(small_worker, lose_it, lookahead=1, max_grant=8)
    assert seen == calm
    assert engine.groups[0].num_recoveries == 1


async def test_aborts_in_the_middle_of_grants_change_nobody_elses_tokens(
    small_worker: Worker, calm: list[Seen]
) -> None:
    async def come_and_go(engine: Engine, stub: Any) -> None:
        for number in range(6):
            call = stub.Generate(
                Generate(
                    request_id=f"x{number}",
                    prompt_token_ids=make_prompt(12, seed=9),
                    sampling=types_pb2.SamplingParams(max_tokens=60),
                )
            )
            await call.read()
            call.cancel()

    seen, _ = await serve(small_worker, come_and_go, lookahead=1, max_grant=8)
    assert seen == calm


@pytest.mark.parametrize(("lookahead", "max_grant"), [(0, 0), (2, 0), (1, 8)])
@pytest.mark.parametrize("caches", [True, False])
async def test_what_was_swapped_out_goes_on_with_the_same_tokens(
    small_worker: Worker, calm: list[Seen], lookahead: int, max_grant: int, caches: bool
) -> None:
    seen, engine = await serve(
        small_worker,
        preemption=Preemption.SWAP,
        enable_prefix_caching=caches,
        lookahead=lookahead,
        max_grant=max_grant,
        state_check_interval=3,
    )
    assert seen == calm
    (group,) = engine.groups
    view = group.core.view
    assert view.num_swapped_in > 0
    assert view.num_free_host_blocks == NUM_HOST_BLOCKS
    assert group.num_recoveries == 0


@pytest.mark.parametrize("length", [15, 16, 17, 41])
async def test_siblings_get_the_tokens_that_they_would_get_alone(
    small_worker: Worker, length: int
) -> None:
    prompt = make_prompt(length, seed=5)
    alone, engine = await serve(
        small_worker, wanted=[(n, prompt, "") for n in range(4)], enable_prefix_caching=False
    )
    assert engine.groups[0].core.counters.num_forks == 0
    for caches in (False, True):
        forked, engine = await serve(
            small_worker,
            wanted=[(n, prompt, "outputs") for n in range(4)],
            enable_prefix_caching=caches,
            preemption=Preemption.SWAP,
            state_check_interval=3,
        )
        assert forked == alone
        assert engine.groups[0].num_recoveries == 0
        if not caches:
            assert engine.groups[0].core.counters.num_forks == 3
