"""The process between `pagewire up` and a service: nothing that it started outlives it."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

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
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as guard:
        grandchild = int(guard.stdout.readline())
        assert is_alive(grandchild)
        guard.stdin.close() if how == "close" else guard.terminate()
        assert guard.wait(patience(10)) == 128 + signal.SIGKILL
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
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as guard:
        child, grandchild = map(int, guard.stdout.readline().split())
        if how == "guard":
            guard.kill()
            guard.wait()
            assert_gone([child])
            os.kill(grandchild, signal.SIGKILL)  # its own parent cannot have seen to it
        else:
            os.kill(grandchild, signal.SIGSTOP)
            os.kill(child, signal.SIGKILL)
            assert guard.wait(patience(10)) == 128 + signal.SIGKILL
    assert_gone([child, grandchild])


def test_a_guard_passes_the_status_on():
    guard_path = importlib.util.find_spec("pagewire.cli.launcher.guard").origin
    command = [sys.executable, guard_path, "5", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert guard.wait(patience(10)) == 7
