"""A line of the log is one line, and JSON where that is wanted, whatever a client sends."""

import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_repository import ROOT
from wire.logs.formats import JsonLines, TextLines
from wire.logs.request import CURRENT, LoggedRequest, about

# With halves of characters, as a header that is no UTF-8 leaves them.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
ODD = "a\nb\r\n\x1b[31m\x00\u2028\x85\udcff\U0001f600"


def record(message: str, **more: Any) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"msg": "%s", "args": (message,), "levelname": "INFO", "name": "some.logger"}
    )
    vars(made).update(more)
    return made


@given(ANY_TEXT, ANY_TEXT)
def test_any_text_is_one_valid_line(message: str, request_id: str) -> None:
    made = record(message, request_id=request_id, trace_id="f" * 32)
    line = JsonLines("gateway").format(made)
    assert line.isascii() and len(line.splitlines()) == 1
    read = json.loads(line)
    assert read["message"].encode() == message.encode("utf-8", "backslashreplace")
    assert (read["service"], read["level"], read["trace_id"]) == ("gateway", "info", "f" * 32)
    text = TextLines().format(made)
    assert len(text.splitlines()) == 1 and text.encode()


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError(ODD)
    except ValueError:
        made = record("it failed", exc_info=sys.exc_info())
    read = json.loads(JsonLines("worker", "rank 1").format(made))
    assert "Traceback" in read["exception"] and "ValueError" in read["exception"]
    assert read["rank"] == "rank 1"
    assert "Traceback" in TextLines().format(made)


def test_what_a_line_adds_is_a_field_and_may_be_anything() -> None:
    made = record("x", step=3, share=0.5, nothing=None, worst=float("nan"), where=ODD, kind=str)
    read = json.loads(JsonLines("scheduler").format(made))
    assert (read["step"], read["share"], read["nothing"], read["worst"]) == (3, 0.5, None, "nan")
    assert read["kind"] == "<class 'str'>"


def test_a_line_names_the_request_of_its_task_or_its_own() -> None:
    token = CURRENT.set(None)
    try:
        assert "request" not in TextLines().format(record("x"))
        about("r-1", "abc")
        assert TextLines().format(record("x")).endswith("some.logger: x [request r-1 trace abc]")
        other = record("x", **LoggedRequest("r-2").extra)
        assert TextLines().format(other).endswith("some.logger: x [request r-2]")
        assert json.loads(JsonLines("x").format(record("x")))["request_id"] == "r-1"
    finally:
        CURRENT.reset(token)


@pytest.mark.parametrize("kind", ["thread", "process", "warning", "library"])
def test_what_python_and_libraries_write_has_the_same_form(kind: str) -> None:
    code = {
        "thread": "import threading; threading.Thread(target=lambda: 1 / 0).start()",
        "process": "1 / 0",
        "warning": "import warnings; warnings.warn('careful')",
        "library": "import logging; logging.getLogger('uvicorn.error').warning('odd')",
    }[kind]
    start = (
        "from wire.logs.setup import LoggingOptions, set_up_logging\n"
        "set_up_logging(LoggingOptions('json', 'info'), 'gateway')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start + code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in io.StringIO(done.stderr)]
    assert len(lines) == 1 and lines[0]["service"] == "gateway"
