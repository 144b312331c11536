"""The measure of what was timed, and the order in which candidates are timed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker_svc.tuning import stopwatch
from worker_svc.tuning.stopwatch import ROUNDS, least_us, vote


@pytest.mark.parametrize(
    ("times_us", "expected"),
    [
        ([100.0], 0),
        ([100.0, 98.5], 0),
        ([100.0, 97.5], 1),
        ([100.0, 97.0, 96.0], 1),  # 96 is not worth a change from 97
        ([100.0, 97.0, 90.0], 2),
        ([100.0, 50.0, 99.0], 1),
    ],
)
def test_a_later_one_is_taken_if_it_is_worth_a_change(times_us: list[float], expected: int) -> None:
    assert vote(times_us, worthwhile=0.02) == expected


class FakeEvent:
    """An event of a device whose every call takes the next of these milliseconds."""

    now_ms = 0.0
    num_waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        FakeEvent.num_waits += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at_ms - self.at_ms


@pytest.mark.parametrize("waits", [False, True])
def test_rounds_are_interleaved_and_the_first_does_not_count(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    took_ms: dict[str, list[float]] = {"a": [0.1, 5, 3, 4], "b": [0.2, 7, 9, 6]}

    def work(name: str) -> None:
        FakeEvent.now_ms += took_ms[name][calls.count(name)]
        calls.append(name)

    def wait() -> None:
        assert len(calls) == 2 * (1 + ROUNDS)
        FakeEvent.num_waits += 1

    FakeEvent.num_waits = 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    stream: Any = SimpleNamespace(synchronize=wait)
    monkeypatch.setattr(stopwatch.torch.cuda, "current_stream", lambda: stream)
    found = least_us([lambda: work("a"), lambda: work("b")], waits)
    assert found == pytest.approx([3000.0, 6000.0])
    assert "".join(calls) == "ab" * (1 + ROUNDS)
    assert FakeEvent.num_waits == (len(calls) if waits else 1)
