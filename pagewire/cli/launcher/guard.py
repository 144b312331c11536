"""Runs one command while its own stdin stays open, then ends the command.

    python guard.py GRACE_S COMMAND...

The process at the other end of stdin owns the command: when that end closes, on purpose or because
the owner was killed, the command gets SIGTERM and, after the grace period, SIGKILL. The owner may
write d to send SIGTERM and k to send SIGKILL. What the command has started never outlives it: on
Linux the guard adopts its orphans, and kills them with its process group. The end of its owner
wakes a guard that is stopped. It is started by path and uses the standard library only, to start
quickly.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

POLL_S = 0.05
CLEAN_UP_S = 5.0  # for processes that SIGKILL does not end at once
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
DRAIN, KILL = b"d", b"k"


class Child:
    """The command's process; the one place that reaps, since orphans are children of it, too."""

    def __init__(self, command: Sequence[str]) -> None:
        guard = os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with(guard),
        )
        self.pid = self._process.pid

    def is_running(self) -> bool:
        """True if it runs; reaps what has ended."""
        while self._process.returncode is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == self.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
            elif not pid:
                return True
        return False

    @property
    def status(self) -> int:
        """Its exit status in the shell's form, once it has ended."""
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, and wakes it. It is not reaped elsewhere, so the id is its own."""
        if self.is_running():
            os.kill(self.pid, number)
            os.kill(self.pid, signal.SIGCONT)  # what is stopped would not hear of it


def main(arguments: Sequence[str]) -> int:
    """Returns the command's exit status, in the shell's form for signals."""
    grace_s, command = float(arguments[0]), arguments[1:]
    # The guard exits only through its loop, so that the command never outlives it.
    stop_requested, request_stop = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(request_stop, b"x"))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    child = Child(command)
    while child.is_running():
        readable = select.select([sys.stdin, stop_requested], [], [], POLL_S)[0]
        if readable and not obey(child, sys.stdin in readable):
            stop(child, grace_s)
    clean_up(child.pid)
    return child.status


def obey(child: Child, has_message: bool) -> bool:
    """Does what the owner has written; returns False if the owner is gone or a signal came."""
    written = os.read(sys.stdin.fileno(), 64) if has_message else b""
    if KILL in written:
        child.send(signal.SIGKILL)
    else:
        for _ in range(written.count(DRAIN)):
            child.send(signal.SIGTERM)
    return bool(written)


def stop(child: Child, grace_s: float) -> None:
    """Ends the child: SIGTERM, then SIGKILL after `grace_s` seconds."""
    deadline_s = time.monotonic() + grace_s
    child.send(signal.SIGTERM)
    while child.is_running() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    child.send(signal.SIGKILL)
    while child.is_running():
        time.sleep(POLL_S)


def clean_up(group: int) -> None:
    """Kills the process group of the child that has ended, and adopted orphans."""
    deadline_s = time.monotonic() + CLEAN_UP_S
    signal_all([-group])
    while time.monotonic() < deadline_s:
        signal_all(children(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_S)


def signal_all(pids: Iterable[int]) -> None:
    """Sends SIGKILL to processes, or to process groups as negative ids; they may have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            pass  # macOS's error for a group of zombies


def kill_descendants(guard: int) -> None:
    """Kills all that a guard has started, in its stead; it lives on, so none of them is lost."""
    deadline_s = time.monotonic() + CLEAN_UP_S
    while time.monotonic() < deadline_s and (found := living_descendants(guard)):
        signal_all(found)
        time.sleep(POLL_S)


def living_descendants(pid: int) -> list[int]:
    """The children of a process and theirs that have not ended, where the kernel lists them."""
    found = []
    for child in children(pid):
        found += [child] * (not has_ended(child))
        found += living_descendants(child)
    return found


def has_ended(pid: int) -> bool:
    """True if a process is gone, or waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")


def children(pid: int) -> list[int]:
    """The children of a process, of all its threads, where the kernel lists them."""
    listed = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            listed += thread.read_text().split()
        except OSError:
            continue
    return [int(child) for child in listed]


def prctl(option: int, value: int) -> None:
    """Sets an option of this process; without effect where the system has none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with(guard: int) -> None:
    """Ends this process with its guard, in whatever way that ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
