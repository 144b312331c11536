"""Runs one command while its own stdin stays open, then ends the command.

    python guard.py GRACE_S COMMAND...

The process at the other end of stdin owns the command: when that end closes, on purpose or because
the owner was killed, the command's whole process group gets SIGTERM and, after the grace period,
SIGKILL. It is started by path and uses the standard library only, to start quickly.
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
    """Returns the command's exit status, in the shell's form for signals."""
    grace_s, command = float(arguments[0]), arguments[1:]
    # The guard exits only through its loop, so that the command never outlives it.
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
    """Ends the child and its process group: SIGTERM, then SIGKILL after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    signal_group(child.pid, signal.SIGTERM)
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    signal_group(child.pid, signal.SIGKILL)  # also for processes that outlived the child
    child.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, which may have ended."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        pass  # macOS's error for a group of zombies


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
