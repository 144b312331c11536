"""The kill switch: only in demo mode, only from this machine, only by a page of this server."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.errors.request_errors import RequestError
from gateway.page.demo import check_is_local
from gateway.process.config import parse_args
from tests.gateway.http_calls import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
KILL = "/v1/demo/kill-worker"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "demo.pipe"
    os.mkfifo(path, 0o600)
    return path


async def test_without_the_option_there_is_no_switch(running: Any) -> None:
    error_of(await running.http.post(KILL, json={}), 404)


async def test_a_kill_is_written_into_the_pipe(start: Callable[..., Any], pipe: Path) -> None:
    running = await start(demo=pipe)
    refused = await running.http.post(KILL, json={})
    assert "does not listen" in error_of(refused, 503)["message"]
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        answer = await running.http.post(KILL, json={}, headers={"origin": running.http_url})
        assert answer.status_code == 202
        assert os.read(end, 10) == b"w"
        for headers in (
            {"origin": "https://other.example"},
            {"origin": "null"},
            {"host": "other.example"},
            {"host": "other.example:8000", "origin": "http://other.example:8000"},
        ):
            error_of(await running.http.post(KILL, json={}, headers=headers), 403)
        with pytest.raises(BlockingIOError):
            os.read(end, 10)
    finally:
        os.close(end)


async def test_the_switch_is_for_operators(start: Callable[..., Any], pipe: Path) -> None:
    running = await start(demo=pipe, api_key="secret")
    error_of(await running.http.post(KILL, json={}), 401)


async def test_without_a_worker_there_is_none_to_kill(
    start: Callable[..., Any], pipe: Path, scheduler_server: Any
) -> None:
    scheduler_server[0].is_ready = False
    running = await start(wait=False, demo=pipe)
    error_of(await running.http.post(KILL, json={}), 409)


@pytest.mark.parametrize(
    ("client", "host", "origin"),
    [
        ("127.0.0.1", "localhost:8000", "http://localhost:8000"),
        ("127.0.0.1", "127.0.0.1:8000", None),
        ("::1", "[::1]:8000", "http://[::1]:8000"),
        ("127.0.0.1", "localhost", None),
    ],
)
async def test_calls_of_this_machine_pass(client: str, host: str, origin: str | None) -> None:
    check_is_local(client, host, origin)


@pytest.mark.parametrize(
    ("client", "host", "origin"),
    [
        ("10.0.0.1", "localhost:8000", None),
        ("", "localhost:8000", None),
        ("127.0.0.1", None, None),
        ("127.0.0.1", "evil.example:8000", "http://evil.example:8000"),
        ("127.0.0.1", "localhost.evil.example:8000", None),
        ("127.0.0.1", "127.0.0.1.evil.example", None),
        ("127.0.0.1", "localhost:8000", "http://localhost:9000"),
        ("127.0.0.1", "localhost:8000", "null"),
    ],
)
async def test_calls_from_elsewhere_do_not(
    client: str, host: str | None, origin: str | None
) -> None:
    with pytest.raises(RequestError):
        check_is_local(client, host, origin)


@pytest.mark.parametrize("what", ["missing", "file", "open to all", "host"])
async def test_a_gateway_that_others_could_kill_through_does_not_start(
    what: str, pipe: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {"missing": tmp_path / "none", "file": tmp_path / "file"}.get(what, pipe)
    (tmp_path / "file").write_text("")
    pipe.chmod(0o622 if what == "open to all" else 0o600)
    host = "0.0.0.0" if what == "host" else "127.0.0.1"
    words = ["--model", str(model_folder), "--scheduler", "127.0.0.1:1", "--host", host]
    with pytest.raises(SystemExit):
        parse_args([*words, "--demo", str(path), "--api-key", "k"])
    assert "--demo: " in capsys.readouterr().err
