"""From a scheduler that says that it will end to the next one: what waits, and for how long."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.request.generation import PrefixReuse, SamplingParams, Standing
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission
from pagewire.v1 import scheduler_pb2, types_pb2
from wire import columns
from wire.deaths import PeerLoss

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = Submission("a", [1, 2, 3], SamplingParams(), Standing(), PrefixReuse())
DRAINING = scheduler_pb2.SessionResponse(draining=True)


class _Link(SchedulerLink):
    """A link without a stream: what it sends is kept."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        super().__init__(grpc.aio.insecure_channel("127.0.0.1:1"), "nowhere", timeout_s)

    def connect(self) -> None:
        self._outbox = asyncio.Queue()

    def sent(self) -> list[Any]:
        for live in self._live.values():
            if not live.is_submitted:
                self._try_again(live, time.monotonic())
        found = []
        while self._outbox is not None and not self._outbox.empty():
            message = self._outbox.get_nowait()
            assert message is not None
            found.append(message.submit)
        return found

    def hear(self, message: scheduler_pb2.SessionResponse) -> None:
        self._deliver(message)

    def break_off(self) -> None:
        self._outbox = None
        self._handover.stream_ended()
        self._lose("UNAVAILABLE: this scheduler is shutting down", PeerLoss.HARMLESS)


def token(live: LiveRequest, token_id: int) -> scheduler_pb2.SessionResponse:
    handles = columns.pack([live.handle], columns.UINT32)
    return scheduler_pb2.SessionResponse(handles=handles, token_ids=columns.pack([token_id]))


def refusal(live: LiveRequest, code: grpc.StatusCode) -> scheduler_pb2.SessionResponse:
    finished = scheduler_pb2.Finished(
        handle=live.handle,
        reason=types_pb2.FINISH_REASON_ERROR,
        status_code=code.value[0],
        message="this scheduler is shutting down",
    )
    return scheduler_pb2.SessionResponse(finished=[finished])


async def test_a_new_request_waits_for_the_next_scheduler_and_comes_to_it_as_a_new_one() -> None:
    link = _Link()
    link.connect()
    running = link.submit(ASKED)
    assert len(link.sent()) == 1
    link.hear(DRAINING)
    held = link.submit(ASKED)
    assert link.sent() == [], "the scheduler that ends gets nothing more"
    link.hear(token(running, 7))  # and finishes what it has
    link.break_off()
    late = link.submit(ASKED)  # there is no scheduler now
    link.connect()
    again, first, second = link.sent()
    assert [s.handle for s in (again, first, second)] == [
        running.handle, held.handle, late.handle,
    ]  # fmt: skip
    assert again.num_prompt_tokens == 3 and len(again.prompt_token_ids) == 4 * 4
    # The limits of its queue hold for those that no scheduler has taken before.
    assert not first.HasField("num_prompt_tokens") and not second.HasField("num_prompt_tokens")


async def test_a_request_that_crosses_the_word_on_the_way_is_held_too() -> None:
    link = _Link()
    link.connect()
    live = link.submit(ASKED)
    link.sent()
    link.hear(DRAINING)
    link.hear(refusal(live, grpc.StatusCode.UNAVAILABLE))
    assert not live._end
    link.break_off()
    link.connect()
    (again,) = link.sent()
    assert not again.HasField("num_prompt_tokens")


async def test_a_next_scheduler_without_a_worker_is_asked_again_until_it_serves() -> None:
    link = _Link()
    link.connect()
    link.hear(DRAINING)
    link.break_off()
    link.connect()
    live = link.submit(ASKED)
    for _ in range(3):
        assert len(link.sent()) == 1
        link.hear(refusal(live, grpc.StatusCode.UNAVAILABLE))
    assert not live._end and len(link.sent()) == 1
    link.hear(token(live, 5))
    assert (await live.receive()).token_ids == [5]


async def test_a_full_queue_of_the_next_scheduler_refuses_a_new_request() -> None:
    link = _Link()
    link.connect()
    link.hear(DRAINING)
    live = link.submit(ASKED)
    link.break_off()
    link.connect()
    link.sent()
    link.hear(refusal(live, grpc.StatusCode.RESOURCE_EXHAUSTED))
    with pytest.raises(RequestError) as caught:
        await live.receive()
    assert caught.value.kind is ErrorKind.OVERLOADED


async def test_after_the_handover_a_refusal_is_one() -> None:
    link = _Link()
    link.connect()
    link.hear(DRAINING)
    link.handover_ended()
    assert link.is_handing_over, "the one that serves still is the one that ends"
    link.break_off()
    link.connect()
    link.handover_ended()
    assert not link.is_handing_over
    live = link.submit(ASKED)
    link.sent()
    link.hear(refusal(live, grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(RequestError):
        await live.receive()


async def test_without_a_next_scheduler_what_is_held_ends_with_an_error() -> None:
    link = _Link(timeout_s=0.05)
    link.connect()
    link.hear(DRAINING)
    live = link.submit(ASKED)
    link.break_off()
    with pytest.raises(RequestError) as caught:
        await live.receive()
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert "no other was found within 0.05 s" in caught.value.message
    assert not link.is_handing_over
    with pytest.raises(RequestError, match="no connection"):
        link.submit(ASKED)


async def test_a_held_request_that_its_client_leaves_is_not_submitted() -> None:
    link = _Link()
    link.connect()
    link.hear(DRAINING)
    live = link.submit(ASKED)
    link.close(live)
    link.break_off()
    link.connect()
    assert link.sent() == []
