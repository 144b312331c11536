"""A request that ran when scheduler after scheduler died is ended, and not submitted again."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.request.generation import PrefixReuse, SamplingParams, Standing
from gateway.scheduler.convert import submit_to_proto
from gateway.scheduler.link import MAX_LOSSES, SchedulerLink
from gateway.scheduler.live_request import LiveRequest, Submission
from pagewire.v1 import scheduler_pb2, types_pb2
from wire import columns
from wire.deaths import MAX_DEATHS_IN_ALL, PeerLoss

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = Submission("a", [1], SamplingParams(), Standing(), PrefixReuse())
DIED = "UNAVAILABLE: Socket closed"


class _Link(SchedulerLink):
    """A link without a stream: what it sends is kept."""

    def __init__(self) -> None:
        super().__init__(grpc.aio.insecure_channel("127.0.0.1:1"), "nowhere", 30.0)
        self._last = 0

    def connect(self, instance: int | None = None) -> list[Any]:
        """The next scheduler answers: another one, unless it is named."""
        self._last = self._last + 1 if instance is None else instance
        self._answered(self._last, asyncio.Queue())
        assert self._outbox is not None
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

    def die(self, loss: PeerLoss = PeerLoss.UNCLEAR) -> None:
        self._outbox = None
        self._lose(DIED, loss)


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
    assert not live._end, "which scheduler answers is not known yet"
    assert link.connect() == []
    error = await _ended(live)
    assert error.kind is ErrorKind.POISON
    assert "2 processes, one after the other, died while this request ran" in error.message


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
    link.die(PeerLoss.HARMLESS)
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
    link.connect()
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


async def test_connections_lost_to_the_same_scheduler_are_no_deaths() -> None:
    link = _Link()
    link.connect(7)
    waiting, running, going = link.submit(ASKED), link.submit(ASKED), link.submit(ASKED)
    for _ in range(3 * MAX_DEATHS_IN_ALL):
        link.admit(running)
        link.admit(going)
        link.token(going)
        link.die()
        assert [submit.num_deaths for submit in link.connect(7)] == [0, 0, 0]
    assert not (waiting._end or running._end or going._end)


async def test_a_scheduler_that_died_between_two_lost_connections_counts_once() -> None:
    link = _Link()
    link.connect(7)
    live = link.submit(ASKED)
    for instance, num_deaths in ((7, 0), (8, 1), (8, 1), (8, 1)):
        link.admit(live)
        link.die()
        assert [submit.num_deaths for submit in link.connect(instance)] == [num_deaths]
    link.admit(live)
    link.die()
    link.connect(9)
    assert (await _ended(live)).kind is ErrorKind.POISON


async def test_a_scheduler_that_does_not_say_which_it_is_may_be_another_one() -> None:
    link = _Link()
    link.connect(0)
    live = link.submit(ASKED)
    link.admit(live)
    link.die()
    assert [submit.num_deaths for submit in link.connect(0)] == [1]
    assert not live._end


async def test_a_request_ends_with_the_third_scheduler_in_a_row_and_not_the_third_connection() -> (
    None
):
    link = _Link()
    link.connect(7)
    live = link.submit(ASKED)
    for _ in range(3 * MAX_LOSSES):
        link.die(PeerLoss.HARMLESS)
        link.connect(7)
    assert not live._end
    for _ in range(MAX_LOSSES):
        assert not live._end
        link.die(PeerLoss.HARMLESS)
        link.connect()
    assert (await _ended(live)).kind is ErrorKind.UNAVAILABLE


async def test_a_scheduler_that_lives_and_ends_the_stream_each_time_ends_the_request() -> None:
    link = _Link()
    link.connect(7)
    live = link.submit(ASKED)
    for _ in range(MAX_LOSSES):
        assert not live._end
        link.admit(live)
        link.die(PeerLoss.OWN_END)
        link.connect(7)
    assert (await _ended(live)).kind is ErrorKind.UNAVAILABLE
