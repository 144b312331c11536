"""The server for users' tests; and, with its help, resumed streams."""

import asyncio
import doctest
import threading
import time
from itertools import accumulate

import grpc
import pytest

import pagewire
import pagewire.testing
from pagewire._attempts.resume import FIRST_PAUSE_S, MAX_DEATHS_IN_ALL, MAX_PAUSE_S, ResumePatience
from pagewire.testing import FakeServer
from tests.pace import paced, patience

TEXT = "The capital of France is Paris, which lies on the Seine."


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(pagewire.testing)
    assert (failed, attempted) == (0, 2)


def test_streamed_and_whole_are_the_same_and_limits_hold() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        whole, streamed = client.generate("a"), client.stream("a").completion()
        assert whole.text == streamed.text == TEXT
        assert whole.token_ids == streamed.token_ids == client.tokenize(TEXT)
        assert whole.usage == streamed.usage == pagewire.Usage(1, len(TEXT))
        cut = client.chat("b", max_tokens=11)
        assert (cut.text, cut.finish_reason) == ("The capital", "length")
        stopped = client.stream_chat("b", stop=[" is", " of"]).completion()
        assert (stopped.text, stopped.stop_reason) == ("The capital", " of")
        assert client.stream("c", max_tokens=0).completion().text == ""
        assert [one.prompt for one in server.received] == ["a", "a", "b", "b", "c"]


def test_an_answer_may_depend_on_the_prompt_and_options_are_noted() -> None:
    with FakeServer(str.upper) as server, server.client() as client:
        words = ["one", "two", "three"]
        answers = client.batch(words, progress=False, tenant="me", priority=-3)
        assert [answer.text for answer in answers] == ["ONE", "TWO", "THREE"]
        (first, *_) = server.received
        assert (first.options.tenant, first.options.priority) == ("me", -3)


@pytest.mark.parametrize(
    "error",
    [pagewire.Overloaded("full"), pagewire.InvalidArgument("top_p: no"), pagewire.Internal("bug")],
)
def test_a_failure_is_raised_as_it_was_given_and_never_retried(
    error: pagewire.PagewireError,
) -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(error)
        with pytest.raises(type(error), match=str(error)):
            client.generate("a")
        server.fail_next(error, after_words=2)
        stream = client.stream("a")
        assert next(stream).text + next(stream).text == "The capital"
        with pytest.raises(type(error), match=str(error)):
            next(stream)
        assert len(server.received) == 2


def test_a_stream_that_breaks_twice_goes_on_behind_the_tokens_that_came() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("gone"), after_words=3)
        server.fail_next(pagewire.Unavailable("gone"), after_words=6)
        stream = client.stream("a", request_id="mine", seed=7)
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == stream.completion().text == TEXT
        assert stream.completion().token_ids == tuple(map(ord, TEXT))
        assert stream.request_id == "mine"
        known = [bytes(one.options.resume_token_ids).decode() for one in server.received]
        assert known == ["", "The capital of", "The capital of France is Paris,"]
        ids = [one.options.request_id for one in server.received]
        assert ids == ["mine", "mine~1", "mine~2"]
        assert {one.options.sampling.seed for one in server.received} == {7}


def test_a_full_queue_is_sat_out_by_a_stream_that_had_been_let_in_and_by_no_other() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("gone"), after_words=3)
        server.fail_next(pagewire.Overloaded("the queue is full"))
        assert client.stream("a").completion().text == TEXT
        assert len(server.received) == 3
        server.fail_next(pagewire.Overloaded("the queue is full"))
        with pytest.raises(pagewire.Overloaded):
            client.stream("a").completion()


def test_a_stream_of_several_outputs_goes_on_after_what_came_of_each() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("gone"), after_words=3)
        whole = client.stream("a", n=2, temperature=1, seed=7).completion()
        assert [whole.text, *(other.text for other in whole.more)] == [TEXT, TEXT]
        again = server.received[1].options
        assert not again.resume_token_ids
        known = [bytes(one.token_ids).decode() for one in again.resume_outputs]
        assert known == ["The capital of", ""]
        assert not any(one.is_finished for one in again.resume_outputs)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_connection_that_is_lost_after_the_end_of_all_outputs_is_no_failure(
    num_outputs: int,
) -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("Socket closed"), after_words=1000)
        stream = client.stream("a", n=num_outputs)
        assert "".join(piece.text for piece in stream) == TEXT * num_outputs
        assert stream.completion().text == TEXT
        assert len(server.received) == 1


def test_an_asyncio_stream_whose_connection_is_lost_after_its_end_is_whole() -> None:
    async def read(server: FakeServer) -> str:
        async with server.async_client() as client:
            return (await client.stream("a").completion()).text

    with FakeServer(TEXT) as server:
        server.fail_next(pagewire.Unavailable("Socket closed"), after_words=1000)
        assert asyncio.run(read(server)) == TEXT
        assert len(server.received) == 1


def test_an_asyncio_stream_goes_on_as_well() -> None:
    async def read(server: FakeServer) -> str:
        async with server.async_client() as client:
            return (await client.stream_chat("a").completion()).text

    with FakeServer(TEXT) as server:
        server.fail_next(pagewire.Unavailable("gone"), after_words=4)
        assert asyncio.run(read(server)) == TEXT
        assert len(server.received) == 2


def test_a_stream_closed_by_another_thread_in_the_pause_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = threading.Event()

    def pause_s(*_: object) -> float:
        waits.set()
        return 600.0

    monkeypatch.setattr(ResumePatience, "pause_s", pause_s)
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("gone"), after_words=1)
        stream = client.stream("a")
        next(stream)

        def close() -> None:
            waits.wait()
            stream.close()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        with pytest.raises(pagewire.Cancelled, match="closed"):
            next(stream)
        closing.join()
        assert len(server.received) == 1


def test_a_stream_that_never_began_or_may_not_go_on_fails_at_once() -> None:
    with FakeServer(TEXT) as server:
        with server.client() as client:
            server.fail_next(pagewire.Unavailable("no worker"))
            with pytest.raises(pagewire.Unavailable, match="no worker"):
                client.stream("a").completion()
        with pagewire.Client(server.target, resume_timeout_s=0) as client:
            server.fail_next(pagewire.Unavailable("gone"), after_words=1)
            with pytest.raises(pagewire.Unavailable, match="gone"):
                client.stream("a").completion()
        assert len(server.received) == 2


def test_patience_ends_when_nothing_comes_for_so_long() -> None:
    with FakeServer(TEXT) as server:
        limit_s = paced(1.5)
        with pagewire.Client(server.target, resume_timeout_s=limit_s) as client:
            server.fail_next(pagewire.Unavailable("gone"), after_words=1)
            for _ in range(20):
                server.fail_next(pagewire.Unavailable("still gone"))
            began_s = time.monotonic()
            with pytest.raises(pagewire.Unavailable, match="still gone"):
                client.stream("a").completion()
            assert time.monotonic() - began_s < limit_s + patience(5)
        # The pauses double up to the longest, and all of them fit into the limit.
        pauses_s = [min(FIRST_PAUSE_S * 2**i, MAX_PAUSE_S) for i in range(20)]
        most = 1 + sum(total_s <= limit_s for total_s in accumulate(pauses_s))
        assert 2 <= len(server.received) <= most


def test_a_failure_without_a_status_is_refused() -> None:
    with pytest.raises(ValueError, match="PagewireError"):
        FakeServer().fail_next(pagewire.PagewireError("what?"))


class _Broken(grpc.RpcError):
    """A call that ended with a status."""

    def __init__(self, details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__()
        self.code, self.details = lambda: code, lambda: details


def test_a_second_death_without_a_token_in_between_is_poison() -> None:
    patience = ResumePatience(60.0)
    patience.note()
    assert patience.pause_s(_Broken("Socket closed")) is not None
    assert patience.num_deaths == 1
    assert patience.pause_s(_Broken("Socket closed")) is not None, "it did not run"
    patience.note(has_tokens=False)
    assert patience.pause_s(_Broken("Socket closed")) is None and patience.is_poison


def test_a_token_a_planned_end_and_a_wait_are_no_reason_to_blame_a_request() -> None:
    patience = ResumePatience(60.0)
    for _ in range(3):
        patience.note()
        assert patience.pause_s(_Broken("Socket closed")) is not None
    assert patience.num_deaths == 1
    for details in ("this gateway is shutting down", "GOAWAY received", "failed to connect to all"):
        patience.note(has_tokens=False)
        assert patience.pause_s(_Broken(details)) is not None
    assert patience.num_deaths == 1


def test_deaths_without_end_are_poison_although_tokens_come_in_between() -> None:
    patience = ResumePatience(60.0)
    for _ in range(MAX_DEATHS_IN_ALL - 1):
        patience.note()
        assert patience.pause_s(_Broken("Socket closed")) is not None
    patience.note()
    assert patience.pause_s(_Broken("Socket closed")) is None and patience.is_poison


def test_the_next_gateway_hears_of_the_death() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("Socket closed"), after_words=3)
        assert client.stream("a").completion().text == TEXT
        assert [one.options.num_deaths for one in server.received] == [0, 1]
