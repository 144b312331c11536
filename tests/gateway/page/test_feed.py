"""The live stream: one subscription for all viewers, what they are told, and who may look."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from gateway.page import feed as feeds
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import live_pb2, live_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests.gateway.conftest import FakeScheduler, Running, end_gateway, eventually, run_gateway
from tests.gateway.http_calls import error_of
from tests.pace import patience
from wire.columns import UINT8, UINT32, pack
from wire.identity.keys import new_key
from wire.identity.options import IdentityOptions
from wire.identity.roles import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADDRESS = "127.0.0.1:50053"
HOSTILE = '</script><img src=x onerror="alert(1)">\u2028\n\ndata: {"x":1}'


def message(numbers: list[int], new: list[int], uptime_s: float = 5.0) -> live_pb2.WatchResponse:
    """A message of requests that decode; `new` are those whose facts are told."""
    ones = np.ones(len(numbers), dtype=np.int32)
    return live_pb2.WatchResponse(
        status=scheduler_pb2.GetStatusResponse(
            ready=True,
            uptime_s=uptime_s,
            num_running=len(numbers),
            groups=[scheduler_pb2.WorkerGroupStatus(address=ADDRESS, ready=True, num_blocks=4)],
        ),
        groups=[
            live_pb2.GroupActivity(
                address=ADDRESS,
                blocks=live_pb2.BlockMap(num_blocks=4, blocks_per_cell=4, cells=b"\x40\x40\x7f"),
                requests=live_pb2.LiveRequests(
                    numbers=pack(numbers, UINT32),
                    phases=pack([live_pb2.LIVE_PHASE_DECODE] * len(numbers), UINT8),
                    num_tokens=pack(9 * ones),
                    num_computed_tokens=pack(8 * ones),
                    num_blocks=pack(ones),
                    facts=[
                        live_pb2.LiveRequest(
                            number=number,
                            request_id=f"{HOSTILE} {number}",
                            tenant="acme",
                            num_prompt_tokens=5,
                            age_s=2.0,
                        )
                        for number in new
                    ],
                    total=len(numbers),
                ),
                steps=[live_pb2.StepBar(step_id=7, num_steps=1, num_decode_tokens=2, num_rows=2)],
            )
        ],
    )


class FakeLive(live_pb2_grpc.LiveServiceServicer):
    """Sends what a test puts into it; None ends the stream."""

    def __init__(self) -> None:
        self.streams: list[asyncio.Queue[live_pb2.WatchResponse | None]] = []
        self.num_open = 0

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[live_pb2.WatchResponse]:
        queue: asyncio.Queue[live_pb2.WatchResponse | None] = asyncio.Queue()
        self.streams.append(queue)
        self.num_open += 1
        try:
            while (one := await queue.get()) is not None:
                yield one
        finally:
            self.num_open -= 1


@pytest.fixture(scope="module")
def live() -> FakeLive:
    return FakeLive()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(live: FakeLive, model_info: types_pb2.ModelInfo) -> AsyncIterator[Any]:
    scheduler = FakeScheduler(model_info)
    made = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, made)
    live_pb2_grpc.add_LiveServiceServicer_to_server(live, made)
    port = made.add_insecure_port("127.0.0.1:0")
    await made.start()
    yield scheduler, f"127.0.0.1:{port}"
    await made.stop(0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(model_folder: Path, tokenizer: Tokenizer, server: Any) -> AsyncIterator[Running]:
    running = await run_gateway(model_folder, tokenizer, server)
    yield running
    await end_gateway(running)


class Viewer:
    """One reader of the stream."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, dict[str, Any]]:
        """Name and body of the next event."""
        async with asyncio.timeout(patience(10)):
            name, data = "", ""
            async for line in self._lines:
                if not line:
                    return name, json.loads(data)
                key, _, value = line.partition(": ")
                assert key in ("event", "data"), "an event was torn in two"
                name, data = (value, data) if key == "event" else (name, data + value)
        raise AssertionError("the stream has ended")

    async def until(self, wanted: str) -> dict[str, Any]:
        while True:
            name, body = await self.next()
            if name == wanted:
                return body


@asynccontextmanager
async def viewing(gateway: Running, **headers: str) -> AsyncIterator[Viewer]:
    async with gateway.http.stream("GET", "/v1/live", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield Viewer(answer.aiter_lines().__aiter__())


async def subscribed(live: FakeLive) -> asyncio.Queue[Any]:
    """The one open subscription's messages."""
    await eventually(lambda: live.num_open == 1, "the gateway watches")
    return live.streams[-1]


async def left(live: FakeLive) -> None:
    await eventually(lambda: live.num_open == 0, "the gateway has left")


async def test_viewers_share_a_subscription_and_the_last_one_ends_it(
    gateway: Running, live: FakeLive
) -> None:
    before = len(live.streams)
    assert live.num_open == 0
    async with viewing(gateway) as one, viewing(gateway) as another:
        queue = await subscribed(live)
        queue.put_nowait(message([1], [1]))
        for viewer in (one, another):
            assert (await viewer.until("frame"))["groups"][0]["requests"]["number"] == [1]
        assert len(live.streams) == before + 1
    await left(live)


async def test_sessions_are_told_in_the_frames_that_have_them(
    gateway: Running, live: FakeLive
) -> None:
    hostile = scheduler_pb2.SessionStatus(
        worker_address=ADDRESS, session_id=HOSTILE, tenant="acme", state="kept", num_turns=3,
        num_cached_tokens=64, idle_s=2.04, num_prompt_tokens=200, num_found_tokens=150,
    )  # fmt: skip
    async with viewing(gateway) as viewer:
        queue = await subscribed(live)
        for sessions, tells in (([hostile], True), ([], False), ([], True)):
            one = message([], [])
            one.status.sessions.extend(sessions)
            one.tells_sessions = tells
            queue.put_nowait(one)
            frame = await viewer.until("frame")
            if sessions:
                row = [ADDRESS, HOSTILE, "acme", "kept", 3, 64, 2.0, 200, 150]
                assert frame["sessions"] == [row]
            else:
                assert frame.get("sessions") == ([] if tells else None)
    await left(live)


async def test_the_events_are_those_that_the_documents_say(
    gateway: Running, live: FakeLive
) -> None:
    async with viewing(gateway) as viewer:
        (await subscribed(live)).put_nowait(message([3, 4], [3, 4]))
        name, hello = await viewer.next()
        assert name == "hello"
        assert hello["interval_s"] == 0.1 and hello["is_demo"] is False
        assert hello["phases"] == {
            "q": "queue", "g": "grammar", "p": "prefill", "d": "decode", "e": "preempted",
            "w": "worker_away", "k": "kv",
        }  # fmt: skip
        name, facts = await viewer.next()
        assert name == "facts"
        assert facts["groups"][ADDRESS] == [
            [3, f"{HOSTILE} 3", "acme", 5, None, 3.0],
            [4, f"{HOSTILE} 4", "acme", 5, None, 3.0],
        ]
        name, frame = await viewer.next()
        assert name == "frame"
        assert set(frame) == {
            "time_s", "ready", "reason", "max_num_seqs", "block_size", "totals", "groups", "ttft",
            "itl",
        }  # fmt: skip
        assert len(frame["ttft"]) == len(frame["itl"]) == len(hello["bounds_s"]) + 1
        (group,) = frame["groups"]
        assert group["requests"] == {
            "total": 2, "number": [3, 4], "phase": "dd", "tokens": [9, 9], "computed": [8, 8],
            "blocks": [1, 1],
        }  # fmt: skip
        assert group["blocks"] == {"num_blocks": 4, "blocks_per_cell": 4, "cells": "QEB/"}
        assert group["steps"] == [[7, 1, 0, 2, 2, 0]]
    await left(live)


async def test_one_who_comes_late_is_told_the_facts_of_those_who_are_there(
    gateway: Running, live: FakeLive
) -> None:
    async with viewing(gateway) as first:
        queue = await subscribed(live)
        queue.put_nowait(message([1], [1]))
        await first.until("frame")
        queue.put_nowait(message([1, 2], [2]))
        assert [row[0] for row in (await first.until("facts"))["groups"][ADDRESS]] == [2]
        await first.until("frame")
        async with viewing(gateway) as late:
            told = await late.until("facts")
            assert told["all"] is True
            assert [row[0] for row in told["groups"][ADDRESS]] == [1, 2]
            assert (await late.until("frame"))["groups"][0]["requests"]["number"] == [1, 2]
    await left(live)


async def test_facts_of_requests_that_ended_are_not_kept(gateway: Running, live: FakeLive) -> None:
    async with viewing(gateway) as viewer:
        queue = await subscribed(live)
        for number in range(300):
            queue.put_nowait(message([number], [number]))
        async with asyncio.timeout(patience(20)):
            while (await viewer.until("frame"))["groups"][0]["requests"]["number"] != [299]:
                pass
        async with viewing(gateway) as late:
            told = (await late.until("facts"))["groups"][ADDRESS]
            assert len(told) < 150 and told[-1][0] == 299
    await left(live)


async def test_a_lost_scheduler_is_told_and_its_numbers_are_forgotten(
    gateway: Running, live: FakeLive
) -> None:
    async with viewing(gateway) as viewer:
        queue = await subscribed(live)
        queue.put_nowait(message([1], [1]))
        await viewer.until("frame")
        queue.put_nowait(None)
        told = await viewer.until("facts")
        assert told == {"all": True, "groups": {}}
        assert (await viewer.next()) == ("away", {"reason": "the scheduler has ended the stream"})
        await eventually(lambda: live.streams[-1] is not queue, "the gateway watches again")
        live.streams[-1].put_nowait(message([1], [1], uptime_s=0.5))
        assert (await viewer.until("frame"))["time_s"] == 0.5
    await left(live)


async def test_a_message_that_cannot_be_read_does_not_end_the_stream(
    gateway: Running, live: FakeLive
) -> None:
    async with viewing(gateway) as viewer:
        queue = await subscribed(live)
        broken = message([1], [1])
        broken.groups[0].requests.num_tokens = b"abc"
        queue.put_nowait(broken)
        assert "cannot be read" in (await viewer.until("away"))["reason"]
        await eventually(lambda: live.streams[-1] is not queue, "the gateway watches again")
        live.streams[-1].put_nowait(message([2], [2]))
        assert (await viewer.until("frame"))["groups"][0]["requests"]["number"] == [2]
    await left(live)


async def test_viewers_are_bounded(
    gateway: Running, live: FakeLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "MAX_VIEWERS", 1)
    async with viewing(gateway):
        await subscribed(live)
        refused = await gateway.http.get("/v1/live")
        assert "viewers" in error_of(refused, 429)["message"]
        assert refused.headers["retry-after"] == "10"
    await left(live)


async def test_a_scheduler_without_the_service_is_named(start: Callable[..., Any]) -> None:
    running = await start()
    async with viewing(running) as viewer:
        assert "older" in (await viewer.until("away"))["reason"]


async def test_only_operators_see_the_requests_of_others(
    model_folder: Path, tokenizer: Tokenizer, server: Any, live: FakeLive, tmp_path: Path
) -> None:
    made = {role: new_key(role.value, "acme", [role]) for role in (Role.USER, Role.OPERATOR)}
    file = tmp_path / "keys"
    file.write_text("\n".join(entry.line() for _, entry in made.values()))
    running = await run_gateway(
        model_folder, tokenizer, server, identity=IdentityOptions(api_keys=file)
    )
    try:
        error_of(await running.http.get("/v1/live"), 401)
        user = {"authorization": f"Bearer {made[Role.USER][0]}"}
        assert (
            "operator" in error_of(await running.http.get("/v1/live", headers=user), 403)["message"]
        )
        assert live.num_open == 0
        async with viewing(running, authorization=f"Bearer {made[Role.OPERATOR][0]}") as viewer:
            assert (await viewer.next())[0] == "hello"
    finally:
        await end_gateway(running)
    await left(live)


async def test_a_gateway_that_stops_ends_the_streams_of_its_viewers(
    model_folder: Path, tokenizer: Tokenizer, server: Any, live: FakeLive
) -> None:
    running = await run_gateway(model_folder, tokenizer, server)
    async with viewing(running) as viewer:
        await viewer.next()
        stopping = asyncio.create_task(running.gateway.stop())
        with pytest.raises(AssertionError, match="ended"):
            await viewer.until("never")
        await stopping
    await running.http.aclose()
    await running.channel.close()
