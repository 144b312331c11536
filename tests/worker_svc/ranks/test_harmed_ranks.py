"""Ranks killed and stopped at random while streams run: no client may notice.

Runs for PAGEWIRE_HARM_S seconds if that is set; the seed is printed, and PAGEWIRE_KILL_SEED sets
it.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.pace import patience
from tests.worker_svc.parallel.test_tensor_parallel import save
from tests.worker_svc.ranks.test_ranks import RankGroup, is_running, run_requests, start_group

HARM_S = float(os.environ.get("PAGEWIRE_HARM_S") or 0)
NUM_RANKS = 4
BLIP_S = 1.0  # shorter than --rank-timeout-s

Harm = Callable[[list[int]], None]


def one(number: signal.Signals) -> Harm:
    """Sends a signal to the first of the ranks, shuffled."""
    return lambda pids: os.kill(pids[0], number)


def two(pids: list[int]) -> None:
    """Kills two ranks at once."""
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)


def stop_and_kill_another(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)


def blip(pids: list[int]) -> None:
    """Stops a rank for a time within the limit."""
    os.kill(pids[0], signal.SIGSTOP)
    threading.Timer(BLIP_S, os.kill, (pids[0], signal.SIGCONT)).start()


HARMS: dict[str, Harm] = {
    "kill": one(signal.SIGKILL),
    "crash": one(signal.SIGSEGV),
    "terminate": one(signal.SIGTERM),
    "stop": one(signal.SIGSTOP),
    "kill two": two,
    "stop and kill another": stop_and_kill_another,
    "blip": blip,
}


@pytest.mark.skipif(not HARM_S, reason="PAGEWIRE_HARM_S=60 runs it for a minute")
def test_streams_survive_whatever_happens_to_ranks(tmp_path: Path) -> None:
    seed = int(os.environ.get("PAGEWIRE_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"PAGEWIRE_KILL_SEED={seed}")
    rng = random.Random(seed)
    folder = save(tmp_path / "model", "llama-biases")
    group = start_group(folder, tmp_path / "log", {"--tensor-parallel-size": str(NUM_RANKS)})
    try:
        group.wait_until_ready()
        calm = asyncio.run(run_requests(group.port))
        end_s = time.monotonic() + HARM_S
        while time.monotonic() < end_s:
            assert run_harmed(group, rng) == calm
        group.process.send_signal(signal.SIGTERM)
        assert group.process.wait(patience(30)) == 0
        assert not [pid for pid in group.ranks if is_running(pid)]
    finally:
        group.process.kill()
        group.process.wait()


def run_harmed(group: RankGroup, rng: random.Random) -> list[list[int]]:
    name, pids = rng.choice(list(HARMS)), rng.sample(group.ranks, NUM_RANKS)
    began_s = time.monotonic()
    tokens = asyncio.run(run_requests(group.port, partial(HARMS[name], pids)))
    print(f"{name}: {time.monotonic() - began_s:.1f} s")
    group.wait_until_ready(group.num_starts)
    return tokens
