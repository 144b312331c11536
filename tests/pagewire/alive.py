"""A check that processes are alive, by the kernel's list."""

import time
from pathlib import Path

from tests.pace import patience


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_gone(pids: list[int], within_s: float = patience(10.0)) -> None:
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)
