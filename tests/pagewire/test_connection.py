"""Keys, encryption and the options of the channel."""

from pathlib import Path

import pytest

import pagewire
from pagewire import TLS
from pagewire._channel import Connection, ReadyWait, is_local
from tests.pace import patience

CERTS = Path(__file__).parent / "certs"


def test_the_key_travels_with_every_call(gateway):
    with pagewire.Client(gateway.target, api_key="secret") as client:
        client.models()
        client.stream("Q").completion()
        client.batch(["Q"])
    assert [call.get("authorization") for call in gateway.metadata] == ["Bearer secret"] * 3


async def test_the_key_travels_with_every_asyncio_call(gateway):
    async with pagewire.AsyncClient(gateway.target, api_key="secret") as client:
        await client.models()
        await client.stream("Q").completion()
    assert [call.get("authorization") for call in gateway.metadata] == ["Bearer secret"] * 2


def test_without_a_key_none_is_sent(gateway):
    with pagewire.Client(gateway.target) as client:
        client.models()
    assert "authorization" not in gateway.metadata[0]


@pytest.mark.parametrize("client", [pagewire.Client, pagewire.AsyncClient])
def test_a_key_is_not_sent_in_clear_to_another_machine(client):
    with pytest.raises(ValueError, match=r"api_key.*models\.example:50051") as caught:
        client("models.example:50051", api_key="secret")
    assert "secret" not in str(caught.value)
    client("models.example:50051", api_key="secret", tls=TLS())
    client("models.example:50051", api_key="secret", allow_insecure_key=True)


def test_the_key_is_not_in_the_repr():
    assert "secret" not in repr(Connection(api_key="secret"))


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:50051", True),
        ("127.8.9.1", True),
        ("[::1]:50051", True),
        ("ipv6:[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("unix:/tmp/socket", True),
        ("localhost.example:50051", False),
        ("10.0.0.1:50051", False),
        ("[2001:db8::1]:50051", False),
        ("dns:///gateway.example:50051", False),
        ("0.0.0.0:50051", False),
    ],
)
def test_local_targets_are_told_from_others(target, local):
    assert is_local(target) is local


def test_tls_with_a_client_certificate_works(secure_gateway):
    tls = TLS(CERTS / "ca.pem", CERTS / "client.pem", CERTS / "client.key")
    with pagewire.Client(secure_gateway.target, tls=tls, timeout_s=patience(10)) as client:
        assert client.generate("Q").text == "Q:The capital is Paris."


async def test_tls_works_with_asyncio(secure_gateway):
    tls = TLS(CERTS / "ca.pem", CERTS / "client.pem", CERTS / "client.key")
    async with pagewire.AsyncClient(
        secure_gateway.target, tls=tls, timeout_s=patience(10)
    ) as client:
        assert (await client.generate("Q")).text == "Q:The capital is Paris."


@pytest.mark.parametrize("tls", [None, TLS(), TLS(CERTS / "ca.pem")])
def test_the_wrong_kind_of_connection_is_refused(secure_gateway, tls):
    with (
        pagewire.Client(secure_gateway.target, tls=tls, timeout_s=patience(5)) as client,
        pytest.raises(pagewire.Unavailable),
    ):
        client.generate("Q")


def test_half_a_client_certificate_is_refused():
    with pytest.raises(ValueError, match="client_cert and client_key"):
        TLS(client_cert="client.pem")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_deadline_must_be_positive(timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        pagewire.Client(timeout_s=timeout_s)


def test_an_infinite_deadline_is_none():
    connection = Connection(timeout_s=3.0)
    assert connection.terms(None)["timeout"] == 3.0
    assert connection.terms(1.0)["timeout"] == 1.0
    assert connection.terms(float("inf"))["timeout"] is None


def test_a_server_too_slow_for_an_attempt_has_twice_as_long_for_the_next():
    wait = ReadyWait("here", 1000.0)
    attempts = []
    for _ in range(4):
        attempts.append(wait.attempt_s())
        wait.sit_out(pagewire.DeadlineExceeded("no answer"))
    assert attempts == [2.0, 4.0, 8.0, 16.0]


def test_metadata_travels_with_calls_and_streams(gateway):
    with pagewire.Client(gateway.target, metadata={"X-Team": "search"}) as client:
        trace = {"traceparent": "00-1-2-01"}
        client.generate("Q", metadata=trace)
        client.stream("Q", metadata=trace | {"x-team": "ads"}).completion()
        client.batch(["Q"], metadata=trace)
        client.models()
    teams = [call.get("x-team") for call in gateway.metadata]
    assert teams == ["search", "ads", "search", "search"]
    assert [call.get("traceparent") for call in gateway.metadata] == ["00-1-2-01"] * 3 + [None]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"authorization": "x"}, "is set by api_key"),
        ({"grpc-timeout": "1S"}, "no name"),
        ({"a b": "x"}, "no name"),
        ({"trace-bin": "x"}, "no name"),
        ({"x-secret": "é-secret"}, "the value of x-secret is not printable ASCII"),
        ({"x-secret": "a\r\nb-secret"}, "the value of x-secret"),
        ({"x-secret": 7}, "the value of x-secret"),
    ],
)
def test_metadata_that_a_call_cannot_carry_is_refused_without_its_value(gateway, metadata, problem):
    with pagewire.Client(gateway.target) as client:
        for ask in (client.generate, client.stream, client.chat):
            with pytest.raises(pagewire.InvalidArgument, match=f"metadata: .*{problem}") as caught:
                ask("Q", metadata=metadata)
            assert "-secret" not in str(caught.value).replace("x-secret", "")
    with pytest.raises(pagewire.InvalidArgument, match="metadata"):
        pagewire.Client(gateway.target, metadata=metadata)
    assert gateway.requests == []


@pytest.mark.parametrize("client", [pagewire.Client, pagewire.AsyncClient])
def test_settings_come_from_the_environment_unless_they_are_given(client, monkeypatch):
    for name, value in {
        "TARGET": "localhost:7",
        "API_KEY": "secret",
        "TIMEOUT_S": "12.5",
        "MAX_RETRIES": "3",
    }.items():
        monkeypatch.setenv(f"PAGEWIRE_{name}", value)
    found = client()._connection
    assert (found.target, found.api_key, found.tls) == ("localhost:7", "secret", None)
    assert (found.timeout_s, found.max_retries) == (12.5, 3)
    given = client("localhost:8", api_key="own", timeout_s=1.0, max_retries=0)._connection
    assert (given.target, given.api_key) == ("localhost:8", "own")
    assert (given.timeout_s, given.max_retries) == (1.0, 0)
    monkeypatch.setenv("PAGEWIRE_TARGET", "models.example:50051")
    with pytest.raises(ValueError, match="unencrypted"):
        client()
    monkeypatch.setenv("PAGEWIRE_CA_CERT", str(CERTS / "ca.pem"))
    assert client()._connection.tls == TLS(str(CERTS / "ca.pem"))
    monkeypatch.setenv("PAGEWIRE_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="PAGEWIRE_TIMEOUT_S: 'soon' is no number"):
        client()
