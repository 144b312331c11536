"""Options of identity that do not fit are refused at the start, by name, by every service."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import gateway.process.config
import scheduler_svc.config
import worker_svc.config

Parse = Callable[[list[str]], object]


def parse_gateway(words: list[str]) -> object:
    """With a folder that passes for a model's."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").touch()
        own = ["--model", folder, "--scheduler", "127.0.0.1:1"]
        return gateway.process.config.parse_args([*own, *words])


SERVICES: dict[str, Parse] = {
    "gateway": parse_gateway,
    "scheduler": scheduler_svc.config.parse,
    "worker": worker_svc.config.parse,
}
OF_ALL = [
    ("--tls-cert a", "--tls-cert and --tls-key belong together"),
    ("--tls-key a", "--tls-cert and --tls-key belong together"),
    ("--tls-client-ca a", "--tls-client-ca needs --tls-cert"),
    ("--health-port 70000", "--health-port: 70000 is not a port"),
]
OF_CALLERS = [
    ("--tls-client-cert a", "--tls-client-cert and --tls-client-key belong together"),
    ("--tls-client-cert a --tls-client-key b", "--tls-client-cert needs --tls-ca"),
]
OF_SERVANTS = [
    ("--host 0.0.0.0", "--host: 0.0.0.0 can be reached from other machines"),
    ("--host ::", "--host: :: can be reached"),
    ("--host pod-1.example", "--host: pod-1.example can be reached"),
    ("--host 0.0.0.0 --tls-cert a --tls-key b", "give --tls-client-ca or --peer-token-file"),
    ("--api-keys f", "--api-keys needs --tls-client-ca or --peer-token-file"),
]
CASES = [
    *((name, *case) for name in SERVICES for case in OF_ALL),
    *((name, *case) for name in ("gateway", "scheduler") for case in OF_CALLERS),
    *((name, *case) for name in ("scheduler", "worker") for case in OF_SERVANTS),
    ("gateway", "--api-key k --api-keys f", "--api-key and --api-keys exclude each other"),
    ("gateway", "--insecure", "--insecure"),
    ("worker", "--tls-ca a", "--tls-ca"),
]


@pytest.mark.parametrize(("service", "words", "problem"), CASES)
def test_what_does_not_fit_is_refused_by_name(
    service: str, words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        SERVICES[service](words.split())
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("service", ["scheduler", "worker"])
@pytest.mark.parametrize(
    "words",
    [
        "--host 127.0.0.2",
        "--host ::1",
        "--host localhost",
        "--host 0.0.0.0 --insecure",
        "--host 0.0.0.0 --peer-token-file f",
        "--host 0.0.0.0 --tls-cert a --tls-key b --tls-client-ca c",
        "--peer-token-file f --api-keys g",
    ],
)
def test_what_fits_is_accepted(service: str, words: str) -> None:
    assert SERVICES[service](words.split())


def test_the_key_of_the_environment_is_required_unless_there_is_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", "of the environment")
    assert parse_gateway([]).api_key == "of the environment"  # type: ignore[attr-defined]
    assert parse_gateway(["--api-key", "k"]).api_key == "k"  # type: ignore[attr-defined]
    assert parse_gateway(["--api-keys", "f"]).api_key is None  # type: ignore[attr-defined]
    monkeypatch.setenv("PAGEWIRE_API_KEY", "")
    assert parse_gateway([]).api_key is None  # type: ignore[attr-defined]
