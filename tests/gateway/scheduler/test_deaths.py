"""A request that ran when scheduler after scheduler died is ended, and not submitted again."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.errors import ErrorKind, RequestError
from gateway.generation import PrefixReuse, SamplingParams, Standing
from gateway.scheduler.convert import submit_to_proto
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission
from pagewire.v1 import scheduler_pb2, types_pb2
from wire import columns
from wire.deaths import MAX_DEATHS_IN_ALL

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = Submission("a", [1], SamplingParams(), Standing(), PrefixReuse())
DIED = "UNAVAILABLE: Socket closed"


class _Link(SchedulerLink):
    """A link without a stream: what it sends is kept."""

    def __init__(self) -> None:
        super().__init__(grpc.aio.insecure_channel("127.0.0.1:1"), "nowhere", 30.0)

    def connect(self) -> list[Any]:
        self._outbox = asyncio.Queue()
        for live in self._live.values():
            if not live.is_submitted:
                self._try_again(live, 0.0)
        sent = []
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            assert message is not None
            sent.append(message.submit)
        return sent

    def admit(self, live: LiveRequest) -> None:
        admitted = scheduler_pb2.Admitted(handle=live.handle)
        self._deliver(scheduler_pb2.SessionResponse(admitted=[admitted]))

    def token(self, live: LiveRequest) -> None:
        handles = columns.pack([live.handle], columns.UINT32)
        self._deliver(scheduler_pb2.SessionResponse(handles=handles, token_ids=columns.pack([5])))

    def die(self, *, is_death: bool = True) -> None:
        self._outbox = None
        self._lose(DIED, is_death)


async def _ended(live: LiveRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await live.receive()
    return caught.value


async def test_after_the_second_death_it_ends_with_an_error_that_says_so() -> None:
    link = _Link()
    link.connect()
    live = link.submit(ASKED)
    link.admit(live)
    link.die()
    (again,) = link.connect()
    assert again.num_deaths == 1
    link.admit(live)
    link.die()
    error = await _ended(live)
    assert error.kind is ErrorKind.POISON
    assert "2 processes, one after the other, died while this request ran" in error.message
    assert link.connect() == []


async def test_a_token_in_between_clears_it() -> None:
    link = _Link()
    link.connect()
    live = link.submit(ASKED)
    for _ in range(5):
        link.admit(live)
        link.token(live)
        link.die()
        (again,) = link.connect()
        assert again.num_deaths == 1
    assert not live._end


async def test_deaths_without_end_are_ended_although_tokens_come_in_between() -> None:
    link = _Link()
    link.connect()
    live = link.submit(ASKED)
    for _ in range(MAX_DEATHS_IN_ALL):
        assert not live._end
        link.admit(live)
        link.token(live)
        link.die()
        link.connect()
    await live.receive()
    assert (await _ended(live)).kind is ErrorKind.POISON


async def test_who_only_waited_or_lost_a_scheduler_that_was_stopped_is_not_to_blame() -> None:
    link = _Link()
    link.connect()
    waiting, running = link.submit(ASKED), link.submit(ASKED)
    link.admit(running)
    link.die(is_death=False)
    assert [submit.num_deaths for submit in link.connect()] == [0, 0]
    link.die()
    assert [submit.num_deaths for submit in link.connect()] == [0, 0]
    assert not waiting._end and not running._end


async def test_the_count_of_a_client_goes_on_here() -> None:
    link = _Link()
    link.connect()
    asked = Submission(
        "a", [1], SamplingParams(), Standing(), PrefixReuse(), output_token_ids=(5,), num_deaths=1
    )
    assert submit_to_proto(1, asked).submit.num_deaths == 1
    live = link.submit(asked)
    link.admit(live)
    assert (await live.receive()).token_ids == [], "its client hears at once that it runs"
    link.die()
    assert (await _ended(live)).kind is ErrorKind.POISON


async def test_prompt_outputs_that_cannot_be_read_end_their_own_request_alone() -> None:
    link = _Link()
    link.connect()
    bad, other = link.submit(ASKED), link.submit(ASKED)
    broken = types_pb2.PromptOutput(owner=bad.handle, begin=0, count=1, hidden_sum=b"123")
    link._deliver(scheduler_pb2.SessionResponse(prompt_outputs=[broken]))
    link.token(other)
    assert (await _ended(bad)).kind is ErrorKind.INTERNAL
    assert (await other.receive()).token_ids == [5]
