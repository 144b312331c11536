"""Rows handed over from a thread: on the CPU who fetches waits, and a buffer serves in turn."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.pace import patience
from worker_svc.device.late_rows import HostGate, LateRows

CPU = torch.device("cpu")


def test_rows_are_fetched_as_they_were_at_the_end_of_their_turn() -> None:
    late_rows = LateRows(3, 2, CPU, length=2)
    there = torch.empty((2, 2), dtype=torch.int32)
    with ThreadPoolExecutor(1) as filler:
        for number in range(7):
            turn = late_rows.take()
            starts = threading.Event()

            def fill(turn=turn, starts=starts, number=number) -> None:
                starts.wait()
                turn.begin()[:2] = number
                turn.end()

            filling = filler.submit(fill)
            threading.Timer(0.01, starts.set).start()
            turn.fetch(there)
            assert there.tolist() == [[number, number]] * 2
            filling.result()


def test_a_turn_that_nobody_fetches_holds_nobody_up() -> None:
    late_rows = LateRows(1, 1, CPU, length=2)
    for _ in range(3):  # their steps failed at the launch
        late_rows.take().end()
    last = late_rows.take()
    last.begin()[:] = 8
    last.end()
    there = torch.empty((1, 1), dtype=torch.int32)
    last.fetch(there)
    assert there.tolist() == [[8]]


@pytest.mark.parametrize("number", [1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40])
def test_a_gate_counts_on_past_what_a_word_holds(number: int) -> None:
    gate = HostGate(CPU)
    assert not gate.waits_on_device
    gate.open(number - 1)
    through = threading.Event()

    def wait() -> None:
        gate.wait(number)
        through.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert not through.wait(0.02)
    gate.open(number)
    assert through.wait(patience(5))
    gate.wait(number - 1)
