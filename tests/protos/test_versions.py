"""Versions N and N+1 of the services speak to each other, whichever is updated first.

N+1 is played by this version with fields that no one knows yet, added to every message it sends.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2
from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from simulator.workers.fake_worker import Context, FakeWorker, start
from simulator.workers.slots import token_at
from tests.pace import patience
from tests.protos.messages import EXCHANGED
from tests.protos.test_wire import MESSAGES
from tests.scheduler_svc.conftest import service_config
from wire.requests.check import RequestCheck
from wire.server import SERVER_OPTIONS, bind
from wire.versions import SESSION_MAJOR, STEP_MAJOR, session_problem
from worker_svc.protocol import codec
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.preparations import decode_orders
from worker_svc.protocol.step import Limits

LIMITS = Limits(
    num_blocks=4097,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_model_len=2048,
    vocab_size=49152,
    num_state_snapshots=4,
)
OF_TWO_GROUPS = replace(LIMITS, kv_groups=(LayerGroup(16), LayerGroup(32)))
# Field 15000 as a number, 15001 as bytes, 15002 as a fixed number: of N+1.
UNKNOWN = (
    bytes.fromhex("c0a9072a") + bytes.fromhex("caa90703") + b"new" + bytes.fromhex("d5a90701000000")
)


def newer(message: Message) -> Message:
    """The message as N+1 might write it: with unknown fields in it and in each part of it."""
    parsed = type(message).FromString(message.SerializeToString())
    for field, value in parsed.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                part.CopyFrom(newer(part))
    parsed.MergeFromString(UNKNOWN)
    return parsed


def known(message: Message) -> Message:
    """The message without what this version does not know."""
    message.DiscardUnknownFields()  # type: ignore[attr-defined]
    return message


@pytest.mark.parametrize("title", MESSAGES)
def test_what_a_newer_peer_adds_is_ignored_and_the_rest_is_understood(title: str) -> None:
    message = MESSAGES[title]
    written = newer(message).SerializeToString()
    assert len(written) > len(message.SerializeToString())
    assert known(type(message).FromString(written)) == message


def test_the_worker_reads_frames_of_a_newer_scheduler() -> None:
    for title, message in EXCHANGED.items():
        if not isinstance(message, worker_pb2.AttachRequest):
            continue
        before, after = message.SerializeToString(), newer(message).SerializeToString()
        match message.WhichOneof("frame"):
            case "hello":
                assert codec.decode_hello(after) == codec.decode_hello(before), title
            case "cut":
                assert codec.decode_cut(after) == codec.decode_cut(before) is not None, title
            case "prepare":
                assert decode_orders(after, LIMITS) == decode_orders(before, LIMITS), title
            case "step":
                limits = OF_TWO_GROUPS if message.step.appended_to_groups else LIMITS
                steps = [codec.decode_step(frame, limits).steps() for frame in (before, after)]
                ids = [[step.step_id for step in taken] for taken in steps]
                num_steps = message.step.granted_steps or 1
                assert ids[0] == ids[1] and len(ids[0]) == num_steps, title


class _NewerWorker(FakeWorker):
    """Adds unknown fields to all that it sends, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(step_time=StepTime(base_s=0.001))
        self.hello = worker_pb2.Hello()

    def description(self) -> worker_pb2.WorkerDescription:
        description = super().description()
        description.protocol_minor = 99
        return newer(description)  # type: ignore[return-value]

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        async def noted() -> AsyncIterator[worker_pb2.AttachRequest]:
            async for request in request_iterator:
                if request.HasField("hello"):
                    self.hello = request.hello
                yield request

        async for answer in super().Attach(noted(), context):
            yield newer(answer)  # type: ignore[misc]


class _OtherMajor(FakeWorker):
    """A worker that speaks the next major version alone."""

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        theirs = (await anext(request_iterator)).hello.protocol_version
        message = f"protocol_version {theirs}, this worker speaks {STEP_MAJOR + 1}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        yield worker_pb2.AttachResponse()


async def _until(holds: Any) -> None:
    async with asyncio.timeout(patience(10)):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_scheduler_serves_newer_gateways_on_newer_workers() -> None:
    worker = _NewerWorker()
    worker_server, port = await start(worker, "127.0.0.1:0")
    engine = Engine(service_config(port, state_check_interval=4))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[RequestCheck()])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerService(engine), server)
    own_port = bind(server, "127.0.0.1:0", "test")
    await server.start()
    running = asyncio.create_task(engine.run())
    try:
        await _until(lambda: engine.is_ready)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{own_port}") as channel:
            session = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
            sampling = types_pb2.SamplingParams(max_tokens=40, seed=3)
            submit = scheduler_pb2.Submit(
                handle=1, request_id="r", prompt_token_ids=b"\1\0\0\0", sampling=sampling
            )
            await session.write(newer(scheduler_pb2.SessionRequest(submit=submit)))
            token_ids: list[int] = []
            while not (answer := await session.read()).finished:
                token_ids += memoryview(answer.token_ids).cast("i").tolist()
            token_ids += memoryview(answer.token_ids).cast("i").tolist()
            session.cancel()
        seeds, positions = np.full(40, 3, dtype=np.uint64), np.arange(1, 41)
        assert token_ids == token_at(seeds, positions, 32000).tolist()
        assert engine.groups[0].num_recoveries == 0
        assert worker.hello.protocol_minor >= 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)
        await worker_server.stop(None)


async def test_another_major_version_is_refused_by_name_and_is_seen_in_the_status() -> None:
    worker_server, port = await start(_OtherMajor(), "127.0.0.1:0")
    engine = Engine(service_config(port))
    running = asyncio.create_task(engine.run())
    try:
        wanted = f"protocol_version {STEP_MAJOR}, this worker speaks {STEP_MAJOR + 1}"
        await _until(lambda: wanted in engine.reason)
        assert not engine.is_ready
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker_server.stop(None)


def test_a_gateway_refuses_a_scheduler_of_another_major_version_by_name() -> None:
    assert session_problem(SESSION_MAJOR) is None
    assert session_problem(0) is None, "the version before versions were told"
    problem = session_problem(SESSION_MAJOR + 1)
    assert problem is not None
    assert f"session_version {SESSION_MAJOR + 1}" in problem and "update the gateway" in problem
