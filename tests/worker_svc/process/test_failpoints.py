"""Each injected fault has its named effect, once, and at its count."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from pagewire.v1 import worker_pb2
from wire.columns import pack, unpack
from worker_svc.config import parse
from worker_svc.process.failpoints import DEFAULT_STALL_S, Failpoint, Failpoints, Fault


def order(*texts: str) -> Failpoints:
    return Failpoints(list(map(Failpoint.parse, texts)))


def arrive(*texts: str) -> list[int]:
    """Passes five frames through `arriving`."""
    return [
        frame[0]
        for frame in order(*texts).next_stream().arriving(iter(bytes([n]) for n in range(1, 6)))
    ]


def output(step_id: int, **fields: object) -> worker_pb2.AttachResponse:
    made = worker_pb2.ModelRunnerOutput(step_id=step_id, token_ids=pack([7, 8]), **fields)
    return worker_pb2.AttachResponse(output=made)


def leave(
    *texts: str, frames: list[worker_pb2.AttachResponse] | None = None
) -> list[worker_pb2.ModelRunnerOutput]:
    """Passes five outputs through `leaving`."""
    sent = frames or [output(step_id) for step_id in range(1, 6)]
    left = order(*texts).next_stream().leaving(iter([frame.SerializeToString() for frame in sent]))
    return [worker_pb2.AttachResponse.FromString(frame).output for frame in left]


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        ("lose-step@2", [1, 3, 4, 5]),
        ("repeat-step@2", [1, 2, 2, 3, 4, 5]),
        ("swap-steps@2", [1, 3, 2, 4, 5]),
        ("swap-steps@5", [1, 2, 3, 4, 5]),
        ("lose-step@9", [1, 2, 3, 4, 5]),
        ("lose-answer@2", [1, 2, 3, 4, 5]),
    ],
)
def test_faults_of_frames_that_arrive(text: str, frames: list[int]) -> None:
    assert arrive(text) == frames


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("lose-answer@2", [1, 3, 4, 5]),
        ("repeat-answer@2", [1, 2, 2, 3, 4, 5]),
        ("swap-answers@2", [1, 3, 2, 4, 5]),
        ("swap-answers@5", [1, 2, 3, 4]),
    ],
)
def test_faults_of_answers_that_leave(text: str, steps: list[int]) -> None:
    assert [answer.step_id for answer in leave(text)] == steps


def test_a_short_answer_lacks_its_last_token() -> None:
    assert [unpack(a.token_ids).tolist() for a in leave("short-answer@2")[:3]] == [
        [7, 8],
        [7],
        [7, 8],
    ]


def test_an_error_answer_says_nothing_but_that() -> None:
    answers = leave("error-answer@3")
    assert [answer.error for answer in answers] == ["", "", "failpoint", "", ""]
    assert answers[2].step_id == 3 and not answers[2].token_ids


def test_a_bad_hash_waits_for_an_answer_with_hashes_and_changes_one() -> None:
    state = worker_pb2.StateHashes(slots=pack([3]), hashes=np.array([9, 10], dtype="<u8").tobytes())
    frames = [output(1), output(2, state=state), output(3, state=state)]
    answers = leave("bad-hash@1", frames=frames)
    hashes = [np.frombuffer(answer.state.hashes, dtype="<u8").tolist() for answer in answers]
    assert hashes == [[], [8, 10], [9, 10]]


def test_heartbeats_are_not_counted() -> None:
    beat = worker_pb2.AttachResponse(heartbeat=worker_pb2.Heartbeat())
    answers = leave("lose-answer@1", frames=[beat, beat, output(1), output(2)])
    assert [answer.step_id for answer in answers] == [0, 0, 2]


def test_an_answer_held_back_does_not_cross_over_to_the_next_stream() -> None:
    failpoints = order("swap-answers@1")

    def stream() -> Iterator[bytes]:
        yield output(1).SerializeToString()

    assert list(failpoints.next_stream().leaving(stream())) == []
    assert len(list(failpoints.next_stream().leaving(stream()))) == 1


def test_each_fault_has_a_stream_of_its_own() -> None:
    failpoints = order("lose-step@2", "repeat-step@1", "lose-step@1")

    def stream() -> list[int]:
        frames = (bytes([number]) for number in range(1, 4))
        return [frame[0] for frame in failpoints.next_stream().arriving(frames)]

    assert [stream() for _ in range(4)] == [[1, 3], [1, 1, 2, 3], [2, 3], [1, 2, 3]]


def test_a_fault_that_was_not_due_waits_for_the_next_stream() -> None:
    failpoints = order("lose-step@3", "lose-step@1")
    short = failpoints.next_stream().arriving(iter([b"1", b"2"]))
    assert len(list(short)) == 2
    assert len(list(failpoints.next_stream().arriving(iter([b"1", b"2", b"3"])))) == 2
    assert list(failpoints.next_stream().arriving(iter([b"1"]))) == []


def test_a_stall_takes_its_seconds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[list[float]] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept_s[-1].append(seconds))
    faults = order("stall@2:0.05").next_stream()
    for _ in range(3):
        slept_s.append([])
        faults.before_step()
        faults.after_step()
    assert [sum(seconds) for seconds in slept_s] == [0.0, 0.05, 0.0]


def test_a_slow_device_is_slow_on_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    failpoints = order("slow@2:0.25", "stall@3:1")
    for _ in range(2):
        faults = failpoints.next_stream()
        for _ in range(3):
            faults.before_step()
    assert slept_s == [0.25, 1.25, 0.25, 0.25]


def test_options_are_read_and_unknown_names_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(["--failpoint", "exit@7", "--failpoint", "stall@3"])
    assert config.failpoints == (
        Failpoint(Fault.EXIT, 7),
        Failpoint(Fault.STALL, 3, DEFAULT_STALL_S),
    )
    for text, names in (
        ("explode@1", "lose-step"),
        ("@1", "lose-step"),
        ("exit", "exit@COUNT"),
        ("exit@0", "exit@COUNT"),
        ("exit@1:5", "stall"),
        ("slow@1", "slow@COUNT:SECONDS"),
    ):
        with pytest.raises(SystemExit):
            parse(["--failpoint", text])
        message = capsys.readouterr().err.splitlines()[-1]
        assert text.partition("@")[0] in message and names in message


def test_faults_of_cuda_are_refused_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lose-device", "hang-device"):
        with pytest.raises(SystemExit):
            parse(["--device", "cpu", "--failpoint", f"{name}@1"])
        assert f"device: cpu must be cuda for failpoint {name}" in capsys.readouterr().err
        assert parse(["--failpoint", f"{name}@1"]).failpoints[0].fault.value == name
