"""Durations of ranks' silence, and names of exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker_svc.conftest import TIMEOUT_S
from worker_svc.process.exit_codes import ExitCode, meaning
from worker_svc.process.heartbeat import BEAT_S, LONGEST_TICK_S, Silence, hear, make_pair

REPOSITORY = Path(__file__).parents[3]


def test_a_rank_is_silent_since_it_was_heard_last() -> None:
    silence = Silence(2)
    for _ in range(4):
        silence.tick(BEAT_S)
        silence.heard(1)
    silence.tick(BEAT_S)
    assert silence.seconds == [5 * BEAT_S, BEAT_S]


def test_a_supervisor_that_stood_still_itself_blames_nobody() -> None:
    silence = Silence(1)
    silence.tick(3600.0)
    assert silence.seconds == [LONGEST_TICK_S]


RANK = """
import signal, socket, sys
from worker_svc.process.heartbeat import RankHeartbeat
heartbeat = RankHeartbeat(socket.socket(fileno=int(sys.argv[1])))
heartbeat.say_ready(50053)
heartbeat.start()
signal.pause()
"""


def test_a_rank_says_that_it_is_ready_and_that_it_lives_and_ends_with_its_supervisor() -> None:
    ours, theirs = make_pair()
    with theirs:
        command = [sys.executable, "-c", RANK, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=REPOSITORY)
    with ours:
        assert [hear(ours), hear(ours), hear(ours)] == [50053, 0, 0]
    assert process.wait(TIMEOUT_S) == 1


def test_the_end_of_a_rank_is_heard() -> None:
    ours, theirs = make_pair()
    with ours:
        theirs.close()
        assert hear(ours) is None


@pytest.mark.parametrize("code", ExitCode)
def test_an_exit_code_of_ours_is_told_by_name(code: ExitCode) -> None:
    assert meaning(code.value) == f"{code.value}, {code.name}"
    assert meaning(-9) == "-9"
