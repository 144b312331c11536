"""The stream to the scheduler: sharing, breaks, recovery, and errors to trust or to retry."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.request.generation import PrefixReuse, SamplingParams, Standing
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission, TokenArrival
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.pace import patience
from wire import columns
from wire.grammar import LLGUIDANCE_VERSION
from wire.server import SERVER_OPTIONS, PortInUse, bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = Submission("a", [1], SamplingParams(), Standing(), PrefixReuse())
REQUEST = pb.GenerateRequest(prompt=pb.Prompt(text="Hello"))


async def test_many_requests_share_the_stream_and_each_gets_its_own(running: Any) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    responses = await asyncio.gather(*(stub.Generate(REQUEST) for _ in range(50)))
    assert {response.output.text for response in responses} == {"Hello world"}
    handles = [submit.handle for submit in running.scheduler.submits]
    assert len(set(handles)) == 50
    assert running.scheduler.aborted == []


async def test_a_broken_stream_fails_its_requests_and_the_next_ones_succeed(
    running: Any, eventually: Any
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    running.scheduler.breaks_on_submit = True
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Generate(REQUEST)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "lost the scheduler" in error.value.details()
    running.scheduler.breaks_on_submit = False
    await eventually(lambda: running.gateway._link.is_open, "a new stream")
    assert (await stub.Generate(REQUEST)).output.text == "Hello world"


async def test_streams_that_break_every_few_tokens_end_as_if_nothing_had_happened(
    running: Any, encode: Any
) -> None:
    text = "The capital of France is Paris."
    running.scheduler.output = encode(text)
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    whole = await stub.Generate(REQUEST)
    running.scheduler.submits.clear()
    running.scheduler.breaks_after = 3
    answer = await stub.Generate(REQUEST)
    assert answer.output.text == whole.output.text == text
    assert answer.output.token_ids == whole.output.token_ids
    prompt, known = encode("Hello"), running.scheduler.output
    for index, submit in enumerate(running.scheduler.submits):
        assert running.scheduler.prompt_of(index) == prompt + known[: 3 * index]
        assert submit.HasField("num_prompt_tokens") == (index > 0)
        assert submit.handle == running.scheduler.submits[0].handle


async def serve_again(scheduler: Any, port: int) -> grpc.aio.Server:
    """Restarts on the first port, which another connection may hold for a moment."""
    async with asyncio.timeout(patience(10)):
        while True:
            server = grpc.aio.server(options=SERVER_OPTIONS)
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
            try:
                bind(server, f"127.0.0.1:{port}", "the scheduler")
            except PortInUse:
                await asyncio.sleep(0.05)
                continue
            await server.start()
            return server


async def test_no_request_waits_longer_for_a_scheduler_than_it_was_told_to(
    start: Any, scheduler_server: Any, eventually: Any
) -> None:
    scheduler, _ = scheduler_server
    scheduler.hangs_after = 1
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = await start(scheduler=f"127.0.0.1:{port}", scheduler_timeout_s=0.4)
    call = inference_pb2_grpc.InferenceServiceStub(running.channel).GenerateStream(REQUEST)
    assert len((await call.read()).delta.token_ids) == 1
    began_s = asyncio.get_running_loop().time()
    await server.stop(0)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no other was found within 0.4 s" in error.value.details()
    assert asyncio.get_running_loop().time() - began_s >= 0.4
    assert running.gateway._pipeline.live == []


async def test_a_restarted_scheduler_is_found_again(
    start: Any, scheduler_server: Any, eventually: Any
) -> None:
    scheduler, _ = scheduler_server
    first = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, first)
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    running = await start(scheduler=f"127.0.0.1:{port}", scheduler_timeout_s=0.4)
    readiness = running.gateway._readiness
    await first.stop(0)
    await eventually(lambda: readiness.current.model is None, "not ready")
    response = await running.http.post("/v1/completions", json={"prompt": "Hello"})
    assert response.status_code == 503
    assert "scheduler" in response.json()["error"]["message"]

    second = await serve_again(scheduler, port)
    await eventually(lambda: readiness.current.is_ready, "ready again", timeout_s=patience(10))
    response = await running.http.post("/v1/completions", json={"prompt": "Hello"})
    assert response.status_code == 200
    await second.stop(0)


async def test_a_foreign_tokenizer_is_named_with_both_hashes(
    start: Any, scheduler_server: Any, tokenizer: Any
) -> None:
    scheduler, _ = scheduler_server
    scheduler.model.tokenizer_sha256 = "f" * 64
    running = await start(wait=False)
    async with asyncio.timeout(patience(5)):
        while "f" * 64 not in (response := await running.http.get("/ready")).text:
            await asyncio.sleep(0.02)
    assert response.status_code == 503
    assert tokenizer.sha256 in response.text
    response = await running.http.post("/v1/completions", json={"prompt": "Hello"})
    assert response.status_code == 503
    assert scheduler.submits == []


async def test_another_llguidance_in_the_worker_is_warned_of_with_both_versions(
    start: Any, scheduler_server: Any, caplog: Any
) -> None:
    scheduler, _ = scheduler_server

    def warnings() -> set[str]:
        ours = [record for record in caplog.records if record.name == "gateway.scheduler.readiness"]
        return {record.getMessage() for record in ours if record.levelname == "WARNING"}

    for theirs in (LLGUIDANCE_VERSION, "", "0.0.7"):
        scheduler.model.llguidance_version = theirs
        assert warnings() == set()
        await start()
    (warning,) = warnings()
    assert LLGUIDANCE_VERSION in warning and "0.0.7" in warning


async def test_tokens_of_several_steps_are_read_at_once_and_an_error_comes_after_them() -> None:
    live = LiveRequest(1, ASKED)
    reading = asyncio.create_task(live.receive())
    await asyncio.sleep(0)
    live.add(5, None)
    live.add(6, None)
    live.wake()
    live.add(7, None)
    live.end(RequestError(ErrorKind.INTERNAL, "broken"))
    live.wake()
    assert await reading == TokenArrival([5, 6, 7], (), None)
    with pytest.raises(RequestError, match="broken"):
        await live.receive()


async def test_without_a_stream_a_submit_is_refused_at_once() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link = SchedulerLink(channel, "127.0.0.1:1")
        with pytest.raises(RequestError, match=r"^no connection to the scheduler$") as refusal:
            link.submit(ASKED)
        assert refusal.value.kind is ErrorKind.UNAVAILABLE


@pytest.mark.parametrize(
    "response",
    [
        scheduler_pb2.SessionResponse(handles=b"\1\0\0"),
        scheduler_pb2.SessionResponse(handles=columns.pack([1], columns.UINT32)),
    ],
)
async def test_a_message_that_cannot_be_read_breaks_the_stream_and_not_the_gateway(
    response: Any, running: Any, eventually: Any
) -> None:
    scheduler = running.scheduler
    scheduler._answer = lambda submit, outbox: outbox.put_nowait(response)
    answer = await running.http.post("/v1/completions", json={"prompt": "Hello"})
    assert answer.status_code == 503
    del scheduler._answer
    await eventually(lambda: running.gateway._link.is_open, "a new stream")
    answer = await running.http.post("/v1/completions", json={"prompt": "Hello"})
    assert answer.status_code == 200
