"""`pagewire chat` in a terminal, and what it says at once of an address that is none."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagewire import cli
from tests.pace import patience

PASTE, END = b"\x1b[200~", b"\x1b[201~"  # what a terminal puts around a paste


@contextmanager
def chatting(gateway, term: str = "xterm") -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A terminal's descriptor, and the command that reads it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pagewire", "chat", "--target", gateway.target]
    environ = {**os.environ, "TERM": term, "NO_COLOR": ""}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as chat:
        os.close(theirs)
        try:
            yield ours, chat
        finally:
            chat.kill()
            os.close(ours)


def test_chat_in_a_real_terminal_prompts_and_leaves_on_ctrl_d(gateway):
    with chatting(gateway) as (ours, chat):
        seen = read_until(ours, b"> ", b"")
        os.write(ours, b"hello\n")
        seen = read_until(ours, b"tokens/s\x1b[0m\r\n", seen)
        _, _, rest = seen.rpartition(b"tokens/s\x1b[0m\r\n")
        read_until(ours, b"> ", rest)  # the second prompt: before it, Ctrl-D would be lost
        os.write(ours, b"\x04")
        assert chat.wait(patience(10)) == 0
    assert b"tiny. /help" in seen
    assert b"The capital is Paris." in seen
    assert b"\x1b[2m" in seen


@pytest.mark.parametrize(
    "typed",
    [
        PASTE + b"one\ntwo\nthree" + END + b"\r",
        PASTE + b"one\ntwo\nthree\n" + END + b"\r",
        b"one\ntwo\nthree\n",
    ],
)
def test_three_lines_pasted_are_one_question(gateway, typed):
    with chatting(gateway) as (ours, chat):
        read_until(ours, b"> ", b"")
        os.write(ours, typed)
        read_until(ours, b"tokens/s", b"")
        os.write(ours, b"/quit\n")
        read_until_end(ours)
        assert chat.wait(patience(10)) == 0
    asked = [request.messages for request in gateway.requests if hasattr(request, "messages")]
    assert [[turn.content.rstrip("\n") for turn in turns] for turns in asked] == [
        ["one\ntwo\nthree"]
    ]


def test_pasted_commands_are_commands(gateway):
    with chatting(gateway) as (ours, chat):
        read_until(ours, b"> ", b"")
        os.write(ours, b"/clear\n/quit\n")
        assert b"Cleared." in read_until_end(ours)
        assert chat.wait(patience(10)) == 0


@pytest.mark.parametrize("command", ["chat", "complete Q", "status"])
@pytest.mark.parametrize("url", ["http://models.example:8000/v1", "HTTPS://models.example"])
def test_a_url_is_refused_at_once_with_the_form_that_is_expected(command, url, capsys):
    began_s = time.process_time()
    assert cli.main([*command.split(), "--target", url]) == 2
    err = capsys.readouterr().err
    assert f"target: {url} is a URL; give HOST:PORT of the gRPC API" in err
    assert "models.example:50051" in err
    assert time.process_time() - began_s < patience(2)


def read_until(descriptor: int, text: bytes, seen: bytes) -> bytes:
    deadline = time.monotonic() + patience(15)
    while text not in seen:
        readable, _, _ = select.select([descriptor], [], [], deadline - time.monotonic())
        assert readable, seen
        seen += os.read(descriptor, 1024)
    return seen


def read_until_end(descriptor: int) -> bytes:
    """The text until the other end closes, which on Linux is an error of reading."""
    seen = b""
    try:
        while select.select([descriptor], [], [], patience(15))[0]:
            seen += os.read(descriptor, 1024)
    except OSError:
        pass
    return seen
