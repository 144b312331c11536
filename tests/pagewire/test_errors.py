"""Statuses become exceptions, and only calls that are safe to repeat are retried."""

import grpc
import pytest

import pagewire
from pagewire._errors import BY_STATUS, PagewireError
from tests.pace import patience


@pytest.fixture
def client(gateway):
    with pagewire.Client(gateway.target, timeout_s=patience(20)) as client:
        yield client


def test_every_status_but_ok_has_its_exception():
    assert BY_STATUS.keys() == set(grpc.StatusCode) - {grpc.StatusCode.OK}
    assert all(issubclass(kind, PagewireError) for kind in BY_STATUS.values())


@pytest.mark.parametrize("code", [code for code in BY_STATUS if code.name != "CANCELLED"])
def test_a_status_from_the_server_raises_its_exception(client, code):
    with pytest.raises(BY_STATUS[code], match="because the test wants it") as caught:
        client.generate(f"fail {code.name}")
    assert type(caught.value) is BY_STATUS[code]
    assert caught.value.code == code.name
    with pytest.raises(BY_STATUS[code]):
        list(client.stream(f"fail {code.name}"))


def test_overload_says_when_to_come_back(client):
    with (
        pagewire.Client(client._connection.target, max_retries=0) as impatient,
        pytest.raises(pagewire.Overloaded, match="64 requests wait") as caught,
    ):
        impatient.chat("overload")
    assert caught.value.retry_after_s == 2.5
    with pytest.raises(pagewire.Overloaded) as caught:
        client.chat("fail RESOURCE_EXHAUSTED")
    assert caught.value.retry_after_s is None


def test_nobody_at_the_address_is_said_in_words():
    with (
        pagewire.Client("127.0.0.1:1", timeout_s=patience(5)) as client,
        pytest.raises(pagewire.Unavailable, match=r"127\.0\.0\.1:1: is the server running"),
    ):
        client.generate("Q")


@pytest.mark.parametrize("method", ["ListModels", "Tokenize", "Detokenize"])
def test_calls_that_change_nothing_are_retried(client, gateway, method):
    gateway.num_unavailable[method] = 2
    call = {
        "ListModels": client.models,
        "Tokenize": lambda: client.tokenize("hello"),
        "Detokenize": lambda: client.detokenize([104]),
    }[method]
    assert call()
    assert gateway.num_calls[method] == 3


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Chat", "ChatStream"])
def test_generations_are_never_sent_twice(client, gateway, method):
    gateway.num_unavailable[method] = 1
    call = {
        "Generate": lambda: client.generate("Q"),
        "GenerateStream": lambda: client.stream("Q").completion(),
        "Chat": lambda: client.chat("Q"),
        "ChatStream": lambda: client.stream_chat("Q").completion(),
    }[method]
    with pytest.raises(pagewire.Unavailable, match="not now"):
        call()
    assert gateway.num_calls[method] == 1
