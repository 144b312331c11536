"""A scheduler with a real worker: links that break, frames that are harmed, rows that are refused.

The process lives on all the time, and no client sees more than a pause.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, types_pb2, worker_pb2
from scheduler_svc import convert
from scheduler_svc.engine import Engine
from scheduler_svc.worker import link
from tests.byte_relay import ByteRelay
from tests.relay import DOWN, UP, OnePlace, frame_relay
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, make_prompt, serving
from tests.worker_svc.serving.test_depths import Seen, serve
from wire.deaths import PeerLoss

NUM_LOSSES = 20  # more than any request may survive, if they counted
WANTED = [(number, make_prompt(9 + number, seed=number), "") for number in (0, 1, 4)]
Sampling = worker_pb2.RowSampling


@pytest.fixture(scope="module")
def worker(llama_folder: Path) -> Iterator[Worker]:
    with serving(replace(WORKER_CONFIG, num_kv_blocks=80), llama_folder) as ready:
        yield ready


@pytest.fixture(scope="module")
def calm(worker: Worker) -> list[Seen]:
    seen, _ = asyncio.run(serve(worker, wanted=WANTED))
    return seen


def at(port: int) -> Any:
    """The worker at another port: a relay's."""
    return SimpleNamespace(server=SimpleNamespace(port=port))


async def test_connections_to_a_worker_that_are_reset_again_and_again_lose_no_request(
    worker: Worker, calm: list[Seen]
) -> None:
    async def disturb(engine: Engine, _: Any) -> None:
        (group,) = engine.groups
        for number in range(NUM_LOSSES):
            while group.num_recoveries < number or not (group.core and group.core.num_in_flight):
                await asyncio.sleep(0.001)
            relay.cut() if number % 2 else relay.reset()

    async with ByteRelay(worker.server.port) as relay:
        seen, engine = await serve(at(relay.port), disturb, WANTED)
    assert seen == calm
    (group,) = engine.groups
    assert group.num_recoveries >= NUM_LOSSES
    assert not group.core.view.num_suspects


@pytest.mark.parametrize(
    ("what", "direction", "number"),
    [
        ("lose", UP, 9),
        ("repeat", UP, 9),
        ("flip", UP, 9),
        ("lose", DOWN, 9),
        ("swap", DOWN, 9),
        ("flip", DOWN, 1),
    ],
)
async def test_frames_that_are_harmed_on_the_way_to_or_from_a_worker_change_no_token(
    worker: Worker, calm: list[Seen], what: str, direction: str, number: int
) -> None:
    meddle = OnePlace(direction, number, what)
    async with frame_relay(f"127.0.0.1:{worker.server.port}", meddle) as port:
        seen, engine = await serve(at(port), wanted=WANTED, max_grant=0)
    assert seen == calm
    assert meddle.num_done == 1
    (group,) = engine.groups
    assert group.num_recoveries == 1 or number == 1, "a stream that is not open yet is not lost"


BAD_ROWS: dict[str, Callable[[worker_pb2.NewSequence], None]] = {
    "stop_token_ids": lambda new: new.sampling.stop_token_ids.append(1 << 31),
    "temperature": lambda new: setattr(new.sampling, "temperature", float("nan")),
    "top_p": lambda new: setattr(new.sampling, "top_p", 0.0),
    "min_p": lambda new: setattr(new.sampling, "min_p", 2.0),
    "repetition_penalty": lambda new: setattr(new.sampling, "repetition_penalty", 0.0),
    "presence_penalty": lambda new: setattr(new.sampling, "presence_penalty", float("inf")),
    "logit_bias": lambda new: new.sampling.logit_bias.extend([types_pb2.LogitBias(token_id=9999)]),
    "allowed_token_ids": lambda new: new.sampling.allowed_token_ids.append(9999),
    "bad_words_token_ids": lambda new: new.sampling.bad_words_token_ids.extend(
        [types_pb2.TokenSequence()]
    ),
    "logprob_token_ids": lambda new: new.sampling.logprob_token_ids.append(9999),
    # The first one: hashes of a slot's state have the last.
    "token_ids": lambda new: setattr(new, "token_ids", b"\xff\xff\xff\x7f" + new.token_ids[4:]),
}


async def test_a_row_that_the_worker_refuses_ends_that_request_and_no_other(
    worker: Worker, calm: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = convert._to_new_sequence

    def spoiled(new: Any) -> worker_pb2.NewSequence:
        message = write(new)
        if (spoil := BAD_ROWS.get(new.request.request_id)) is not None:
            spoil(message)
        return message

    monkeypatch.setattr(convert, "_to_new_sequence", spoiled)
    problems: dict[str, grpc.aio.AioRpcError] = {}

    async def disturb(_: Engine, stub: Any) -> None:
        for number, name in enumerate(BAD_ROWS):
            request = scheduler_pb2.SchedulerServiceGenerateRequest(
                request_id=name,
                prompt_token_ids=make_prompt(5 + number, seed=number),
                sampling=types_pb2.SamplingParams(max_tokens=5, seed=1),
            )
            try:
                async for _ in stub.Generate(request):
                    pass
            except grpc.aio.AioRpcError as error:
                problems[name] = error

    seen, engine = await serve(worker, disturb, WANTED)
    assert seen == calm
    assert {name: error.code() for name, error in problems.items()} == dict.fromkeys(
        BAD_ROWS, grpc.StatusCode.INVALID_ARGUMENT
    )
    for name, error in problems.items():
        assert f"{name}: " in str(error.details()), error.details()
    assert engine.groups[0].num_recoveries == 0


@pytest.mark.parametrize("is_status_lost", [False, True])
async def test_a_frame_that_the_worker_refuses_ends_its_request_alone(
    worker: Worker, calm: list[Seen], monkeypatch: pytest.MonkeyPatch, is_status_lost: bool
) -> None:
    """What cannot be told row by row ends the stream; its requests go on alone.

    gRPC may lose the stream's status under a write: then the worker's description tells.
    """
    if is_status_lost:
        monkeypatch.setattr(link, "loss_of", lambda _: PeerLoss.UNCLEAR)
    write = convert._to_new_sequence

    def spoiled(new: Any) -> worker_pb2.NewSequence:
        message = write(new)
        if new.request.request_id == "bad":
            message.num_prompt_tokens = 0
        return message

    monkeypatch.setattr(convert, "_to_new_sequence", spoiled)
    errors: list[grpc.aio.AioRpcError] = []

    async def disturb(engine: Engine, stub: Any) -> None:
        while not (engine.groups[0].core and engine.groups[0].core.num_running):
            await asyncio.sleep(0.001)
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            request_id="bad",
            prompt_token_ids=[1, 2, 3],
            sampling=types_pb2.SamplingParams(max_tokens=5),
        )
        try:
            async for _ in stub.Generate(request):
                pass
        except grpc.aio.AioRpcError as error:
            errors.append(error)

    seen, engine = await serve(worker, disturb, WANTED)
    assert seen == calm and len(seen) == len(WANTED)
    assert [error.code() for error in errors] == [grpc.StatusCode.INTERNAL]
    assert "num_prompt_tokens: 0, must be" in str(errors[0].details())
    # The first makes all its requests suspect; then the bad one is alone.
    assert engine.groups[0].num_recoveries == 2
