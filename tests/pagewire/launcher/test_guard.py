"""The process between `pagewire up` and a service: nothing that it started outlives it."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from pagewire.cli.launcher import guard
from tests.pace import patience
from tests.pagewire.alive import assert_gone, is_alive

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["close", "terminate"])
def test_a_guard_kills_what_does_not_listen_and_what_that_has_started(how):
    guard_path = importlib.util.find_spec("pagewire.cli.launcher.guard").origin
    command = [sys.executable, guard_path, "0.3", sys.executable, "-c", STUBBORN]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        grandchild = int(process.stdout.readline())
        assert is_alive(grandchild)
        process.stdin.close() if how == "close" else process.terminate()
        assert process.wait(patience(10)) == 128 + signal.SIGKILL
    assert_gone([grandchild])


@pytest.mark.parametrize("how", ["guard", "child"])
def test_no_process_outlives_a_guard_or_its_command(how):
    """Not even one in a session of its own, which is stopped."""
    guard_path = importlib.util.find_spec("pagewire.cli.launcher.guard").origin
    code = (
        "import os, subprocess, time; "
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, guard_path, "5", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        child, grandchild = map(int, process.stdout.readline().split())
        if how == "guard":
            process.kill()
            process.wait()
            assert_gone([child])
            os.kill(grandchild, signal.SIGKILL)  # its own parent cannot have seen to it
        else:
            os.kill(grandchild, signal.SIGSTOP)
            os.kill(child, signal.SIGKILL)
            assert process.wait(patience(10)) == 128 + signal.SIGKILL
    assert_gone([child, grandchild])


def test_all_that_a_stopped_guard_has_started_can_be_killed_in_its_stead():
    """Also what is stopped itself, and in a session of its own."""
    guard_path = importlib.util.find_spec("pagewire.cli.launcher.guard").origin
    code = (
        "import os, signal, subprocess; "
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "print(os.getpid(), child.pid, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    command = [sys.executable, guard_path, "5", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.kill(process.pid, signal.SIGSTOP)
        guard.kill_descendants(process.pid)
        assert_gone(pids)
        process.kill()


def test_a_guard_passes_the_status_on():
    guard_path = importlib.util.find_spec("pagewire.cli.launcher.guard").origin
    command = [sys.executable, guard_path, "5", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(patience(10)) == 7
