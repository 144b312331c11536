"""Calls are sent again when nothing ran, or under a key by which nothing runs twice."""

import asyncio
import time
from collections.abc import Callable

import grpc
import pytest

import pagewire
from pagewire._attempts.retry import MAX_ADVICE_S, RetryPolicy
from pagewire._connection.status_details import retry_after_s, retry_status
from pagewire.testing import FakeServer
from tests.pace import patience

TEXT = "The capital of France is Paris."
LOST = pagewire.Unavailable("Socket closed")
FULL = pagewire.Overloaded("the queue is full", retry_after_s=0.02)
DRAINS = pagewire.Unavailable("this gateway drains", retry_after_s=0.02)

Ask = Callable[[pagewire.Client], str]
ASKS: dict[str, Ask] = {
    "generate": lambda client: client.generate("a").text,
    "chat": lambda client: client.chat("a").text,
    "stream": lambda client: client.stream("a").completion().text,
    "stream_chat": lambda client: client.stream_chat("a").completion().text,
    "batch": lambda client: client.batch(["a"])[0].text,
    "batch_chat": lambda client: client.batch_chat(["a"])[0].text,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("refusal", [FULL, DRAINS])
def test_a_refusal_that_says_when_is_obeyed_and_the_place_is_kept(
    ask: Ask, refusal: pagewire.PagewireError
) -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(refusal)
        server.fail_next(refusal)
        began_s = time.monotonic()
        assert ask(client) == TEXT
        assert time.monotonic() - began_s >= 2 * 0.02
        options = [one.options for one in server.received]
        assert len(options) == 3
        names = {one.idempotency_key or one.request_id for one in options}
        assert len(names) == 1 and all(names), "a queue keeps a place for a name"


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_retries_are_bounded_and_may_be_none(ask: Ask) -> None:
    with FakeServer(TEXT) as server:
        for max_retries in (2, 0):
            server.received.clear()
            server._failures.clear()
            for _ in range(5):
                server.fail_next(FULL)
            with (
                pagewire.Client(server.target, max_retries=max_retries) as client,
                pytest.raises(pagewire.Overloaded) as caught,
            ):
                ask(client)
            assert caught.value.retry_after_s == 0.02
            assert len(server.received) == 1 + max_retries
            if not max_retries:
                assert not server.received[0].options.idempotency_key


def test_a_wait_beyond_the_deadline_or_beyond_reason_is_the_programs_to_decide() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Overloaded("full", retry_after_s=patience(30)))
        began_s = time.monotonic()
        with pytest.raises(pagewire.Overloaded):
            client.generate("a", timeout_s=patience(20))
        server.fail_next(pagewire.Overloaded("full", retry_after_s=2 * MAX_ADVICE_S))
        with pytest.raises(pagewire.Overloaded):
            client.generate("a", timeout_s=10 * MAX_ADVICE_S)
        assert time.monotonic() - began_s < patience(10)
        assert len(server.received) == 2


@pytest.mark.parametrize("name", ["generate", "chat", "batch", "batch_chat"])
def test_a_call_whose_connection_is_lost_is_sent_again_under_its_key(name: str) -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(LOST)
        assert ASKS[name](client) == TEXT
        first, second = (one.options for one in server.received)
        assert first.idempotency_key == second.idempotency_key != ""
        assert (first.num_deaths, second.num_deaths) == (0, 1)


def test_each_call_has_a_key_of_its_own_and_a_given_one_is_used() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        client.generate("a")
        client.generate("a")
        client.generate("a", idempotency_key="mine")
        client.batch(["a", "b"], idempotency_key="mine", max_concurrency=1)
        keys = [one.options.idempotency_key for one in server.received]
        assert len(set(keys)) == 5
        assert keys[2:] == ["mine", "mine-0", "mine-1"]
        with pytest.raises(pagewire.InvalidArgument, match="idempotency_key: is for calls"):
            client.stream("a", idempotency_key="mine")


def test_a_call_that_kills_gateway_after_gateway_is_not_sent_a_third_time() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        client.generate("the server is one")
        for _ in range(5):
            server.fail_next(LOST)
        with pytest.raises(pagewire.Aborted, match="2 gateways"):
            client.generate("poison")
        assert len(server.received) == 3


def test_a_server_that_never_answered_is_reported_as_it_is() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        for _ in range(5):
            server.fail_next(LOST)
        with pytest.raises(pagewire.Unavailable, match="Socket closed"):
            client.generate("perhaps this is no gateway")
        assert len(server.received) == 2


def test_the_first_attempt_may_still_live_at_the_scheduler_after_a_loss_and_only_then() -> None:
    lives = pagewire.FailedPrecondition("request_id: lives")
    policy = RetryPolicy(5, 30.0)
    call = policy.attempts(60.0)
    conflict = _failed(grpc.StatusCode.ALREADY_EXISTS, str(lives))
    with pytest.raises(pagewire.FailedPrecondition):
        call.pause_s(conflict, "here")
    call.pause_s(_failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), "here")
    assert call.pause_s(conflict, "here") > 0


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_server_that_was_there_before_is_waited_for(ask: Ask) -> None:
    client = pagewire.Client("127.0.0.1:1", timeout_s=patience(10))
    with client, pytest.raises(pagewire.Unavailable, match="is the server running"):
        ask(client)
    policy = RetryPolicy(5, 30.0)
    refused = _failed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
    assert policy.attempts(60.0).refusal_pause_s(refused) is None
    policy.has_answered = True
    call = policy.attempts(60.0)
    pauses = [call.refusal_pause_s(refused) for _ in range(6)]
    assert pauses[5] is None and all(pauses[:5])


def test_callers_who_failed_at_once_come_back_apart() -> None:
    def pause_s() -> float:
        call = RetryPolicy(5, 30.0).attempts(60.0)
        return call.pause_s(_failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), "here")

    pauses = [pause_s() for _ in range(50)]
    assert len(set(pauses)) > 25
    assert min(pauses) >= 0.1 and max(pauses) <= 0.15


def test_a_stream_that_is_refused_after_a_loss_keeps_its_place_in_the_queue() -> None:
    with FakeServer(TEXT) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("gone"), after_words=3)
        server.fail_next(FULL)
        assert client.stream("a", request_id="mine").completion().text == TEXT
        assert [one.options.request_id for one in server.received] == ["mine", "mine~1", "mine~1"]


def test_asyncio_retries_the_same() -> None:
    async def ask(server: FakeServer) -> list[str]:
        async with server.async_client() as client:
            texts = []
            for failure in (FULL, LOST):
                server.fail_next(failure)
                texts.append((await client.generate("a")).text)
            server.fail_next(FULL)
            texts.append((await client.stream("a").completion()).text)
            server.fail_next(LOST)
            texts += [one.text for one in await client.batch(["a", "b"])]
            texts += [one.text for one in await client.batch_chat(["a", "b"])]
            return texts

    with FakeServer(TEXT) as server:
        assert asyncio.run(ask(server)) == [TEXT] * 7
        assert len(server.received) == 7 + 4


def test_the_status_of_a_refusal_is_read_as_it_was_written() -> None:
    for seconds in (0.02, 2.5, 3600.0):
        status = retry_status(grpc.StatusCode.UNAVAILABLE, "é" * 200, seconds)
        error = _failed(status.code, status.details, status.trailing_metadata)
        assert retry_after_s(error) == seconds


class _Failed(grpc.RpcError):
    """A call that ended with a status."""


def _failed(
    code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, bytes], ...] = ()
) -> grpc.RpcError:
    error = _Failed()
    error.code, error.details = lambda: code, lambda: details  # type: ignore[attr-defined]
    error.trailing_metadata = lambda: trailers  # type: ignore[attr-defined]
    return error


def test_a_status_of_a_gateway_is_no_death_whatever_it_says() -> None:
    status = retry_status(grpc.StatusCode.UNAVAILABLE, "Socket closed", 0.1)
    call = RetryPolicy(5, 30.0).attempts(60.0)
    call.pause_s(_failed(*status), "here")
    assert call.num_deaths == 0


@pytest.mark.parametrize(
    "said",
    [
        "last error: Failed to connect to remote host: getsockopt: Connection reset by peer",
        "connections to all backends failing; last error: recvmsg:Connection reset by peer",
    ],
)
def test_a_server_that_resets_a_connection_being_made_was_not_reached(said: str) -> None:
    call = RetryPolicy(5, 30.0).attempts(60.0)
    call.pause_s(_failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), "here")
    for _ in range(3):
        call.pause_s(_failed(grpc.StatusCode.UNAVAILABLE, said), "here")
    assert call.num_deaths == 1
