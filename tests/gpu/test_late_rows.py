"""A stream waits for rows that a thread of the host still writes; the host goes on meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.pace import patience
from worker_svc.device.late_rows import HostGate, LateFill, LateRows
from worker_svc.sampling.grammars import Grammars

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
NUM_ROWS, NUM_WORDS = 64, 4748  # of masks over 151,936 tokens


def fetched(turn: LateFill) -> torch.Tensor:
    there = torch.empty((NUM_ROWS, NUM_WORDS), dtype=torch.int32, device=CUDA)
    turn.fetch(there)
    return there


def test_the_launching_thread_waits_for_nothing_and_the_stream_for_the_rows() -> None:
    late_rows = LateRows(NUM_ROWS, NUM_WORDS, CUDA)
    assert late_rows.gate.waits_on_device
    first = late_rows.take()
    first.end()
    float(fetched(first).double().sum())  # loading a kernel waits for the device
    done = torch.cuda.Event()
    turns = [late_rows.take() for _ in range(2)]
    sums = [fetched(turn).double().sum() for turn in turns]  # before a row is written
    done.record()
    assert not done.query()
    for number, turn in enumerate(turns):
        turn.begin()[:] = number + 5
        assert not done.query()
        turn.end()
    done.synchronize()
    assert [float(total) for total in sums] == [n * NUM_ROWS * NUM_WORDS for n in (5, 6)]


def test_a_buffer_is_written_again_only_once_its_copy_is_done() -> None:
    late_rows = LateRows(NUM_ROWS, NUM_WORDS, CUDA, length=2)
    sums = []
    with ThreadPoolExecutor(1) as filler:

        def fill(turn: LateFill, number: int) -> None:
            turn.begin()[:] = number
            turn.end()

        for number in range(50):
            turn = late_rows.take()
            filler.submit(fill, turn, number)
            torch.cuda._sleep(200_000)
            sums.append(fetched(turn).amax())
    assert [int(value) for value in sums] == list(range(50))


@pytest.mark.parametrize("number", [1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1])
def test_the_device_counts_on_past_what_a_word_holds(number: int) -> None:
    gate, done = HostGate(CUDA), torch.cuda.Event()
    gate.open(number - 1)
    gate.wait(number)
    done.record()
    assert not done.query()
    gate.open(number)
    done.synchronize()


def test_masks_that_fail_let_the_stream_go_on() -> None:
    grammars = Grammars(NUM_WORDS * 32)
    grammars.fill_for(CUDA, NUM_ROWS)

    def lost() -> np.ndarray:
        raise RuntimeError("the device is lost")

    place = grammars.begin("start: nothing", [])  # no vocabulary: it is never built
    nothing = np.zeros(1, dtype=np.int64)
    failed = grammars.fill(nothing, [place], nothing, lost)
    failed.on(CUDA)
    refused = grammars.fill(nothing, [place], nothing, lambda: nothing[:0])
    assert not refused.on(CUDA).any()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="lost"):
        failed.filling.result(patience(5))
    assert "no tokenizer" in refused.problems()[0]
