"""Limits in tests are multiples of a measured pace, and tests are ranked by folders that exist."""

import os
import re
from pathlib import Path

import pytest

from tests import order
from tests.pace import SPARE, VARIABLE, pace, paced, patience

TESTS = Path(__file__).parent
SECONDS = r"\d+(\.\d+)?"
# Seconds that stand as a number where a test waits. 0 is no wait, and below 1 is one that should
# pass in vain: so long nothing may happen.
LIMIT = re.compile(
    rf"asyncio\.timeout\({SECONDS}\)|\.(wait|join|acquire|get)\((timeout=)?[1-9]\d*(\.\d+)?\)"
    rf"|monotonic\(\) \+ \d|TIMEOUT_S = \d|(Client|run|communicate)\(.*timeout(_s)?=[1-9]"
)
ALLOWED = {"test_pace.py", "test_cpu.py"}  # the latter waits for a compiler alone


def limits(source: str) -> list[str]:
    return [found.group() for found in LIMIT.finditer(source)]


def test_no_test_waits_for_a_number_of_seconds() -> None:
    sources = [path for path in TESTS.rglob("*.py") if path.name not in ALLOWED]
    assert len(sources) > 100
    found = {str(path): limits(path.read_text()) for path in sources}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "async with asyncio.timeout(5):",
        "process.wait(10)",
        "assert queue.get(timeout=2.5)",
        "deadline_s = time.monotonic() + 20",
        "TIMEOUT_S = 30",
        "pagewire.Client(target, timeout_s=20)",
    ],
)
def test_every_number_of_seconds_is_recognized(source: str) -> None:
    assert len(limits(source)) == 1


@pytest.mark.parametrize(
    "source", ["process.wait(patience(10))", "thread.join(0.1)", "server.stop(0).wait()"]
)
def test_what_follows_the_pace_is_allowed(source: str) -> None:
    assert limits(source) == []


def test_every_process_of_a_run_has_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float(os.environ[VARIABLE]) == pace() >= 1
    monkeypatch.setenv(VARIABLE, "3.00")
    assert (paced(2.0), patience(2.0)) == (6.0, 6.0 * SPARE)


def test_every_folder_and_file_that_is_ranked_exists() -> None:
    assert [folder for folder in order.RANKS if not (TESTS / folder).is_dir()] == []
    assert all((order.TESTS / folder).is_dir() for folder in order.SLOW_FOLDERS)
    assert set(order.SLOW_FILES) <= {path.stem for path in TESTS.rglob("test_*.py")}
