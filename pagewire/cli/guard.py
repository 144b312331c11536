"""Runs one command for as long as its own stdin stays open, then takes the command down.

    python guard.py GRACE_S COMMAND...

Whoever holds the other end of stdin owns the command: when that end closes, on purpose or because
the owner was killed, the command's whole process group gets SIGTERM and, after the grace, SIGKILL.
Started by path, from a file that needs the standard library alone: it must be cheap.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

POLL_S = 0.05


def main(arguments: Sequence[str]) -> int:
    """Returns what the command exited with, in the shell's way for signals."""
    grace_s, command = float(arguments[0]), arguments[1:]
    # The guard leaves through its loop alone, so that the command never outlives it.
    stop_requested, request_stop = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(request_stop, b"x"))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None:
        if select.select([sys.stdin, stop_requested], [], [], POLL_S)[0]:
            break
    stop_group(child, grace_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def stop_group(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Ends the child and whatever it started, gently first."""
    deadline = time.monotonic() + grace_s
    signal_group(child.pid, signal.SIGTERM)
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    signal_group(child.pid, signal.SIGKILL)  # also what a finished child left behind
    child.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, which may be gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        pass  # macOS says so of a group of zombies


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
