"""Recordings as files: damage is located, a torn end is ignored, an old beginning is cut off."""

import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.core import SessionHint
from scheduler_svc.journal import records, segments
from scheduler_svc.journal.calls import TappedScheduler
from scheduler_svc.journal.mask import Mask
from scheduler_svc.journal.recorder import Recorder, RecordingLimits
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.replay import replay
from scheduler_svc.sampling import Sampling
from tests.pace import patience
from tests.scheduler_svc.core.builders import SMALL, make_request, step
from tests.scheduler_svc.journal.recorded import KEY, MIB, Run, header_for
from wire.columns import pack


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segment with some hundred events."""
    folder = tmp_path_factory.mktemp("recorded") / "r"
    run = Run(folder, "files", is_masked=False)
    run.act(300)
    run.close()
    return segments.segment_path(folder, 1)


def copied(recorded: Path, tmp_path: Path, content: bytes) -> Path:
    """The segment with other bytes."""
    path = tmp_path / recorded.name
    path.write_bytes(content)
    return path


def wait_until(holds: Callable[[], bool], timeout_s: float = patience(60)) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("what", ["record", "length"])
def test_a_flipped_byte_is_named_with_file_and_place(
    recorded: Path, tmp_path: Path, share: float, what: str
) -> None:
    content = bytearray(recorded.read_bytes())
    stored = list(records.read(recorded))[int(share * len(list(records.read(recorded))))]
    content[stored.offset + (20 if what == "record" else 1)] ^= 0x10
    path = copied(recorded, tmp_path, bytes(content))
    with pytest.raises(records.Damaged, match=f"{path} at byte {stored.offset}: .*{what}"):
        replay(Recording(path))


def test_a_record_whose_end_was_not_written_is_left_out(recorded: Path, tmp_path: Path) -> None:
    content, stored = recorded.read_bytes(), list(records.read(recorded))
    last = stored[-1]
    for end in (last.offset + 1, last.offset + 11, last.offset + 13, len(content) - 1):
        path = copied(recorded, tmp_path, content[:end])
        report = replay(Recording(path))
        assert report.divergence is None
        assert report.num_events == len(stored) - 2  # without the header and the torn one


def test_a_record_that_was_cut_out_is_missed(recorded: Path, tmp_path: Path) -> None:
    stored, content = list(records.read(recorded)), recorded.read_bytes()
    first, after = stored[50], stored[51]
    path = copied(recorded, tmp_path, content[: first.offset] + content[after.offset :])
    with pytest.raises(records.Damaged, match="event 51 follows 49"):
        replay(Recording(path))


def test_only_the_one_who_records_may_read(recorded: Path) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorded.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("is_masked", [False, True], ids=["kept", "replaced"])
def test_what_is_left_of_a_long_recording_replays_from_where_it_begins(
    tmp_path: Path, is_masked: bool
) -> None:
    folder, max_bytes = tmp_path / "r", MIB // 2
    run = Run(folder, "ring", is_masked=is_masked, max_bytes=max_bytes)
    num_rounds_left = 5
    while num_rounds_left:
        run.act(20)
        wait_until(run.recorder._queue.empty)
        wait_until(run.recorder._writer.is_settled)  # a real service is slower
        assert segments.size_bytes(folder, "*.journal") <= max_bytes
        assert len(list(folder.glob("*.snapshot"))) <= 1
        assert run.recorder.why_stopped == ""
        num_rounds_left -= segments.numbers(folder)[0] > 6  # cut off a second time
    run.close()
    report = replay(Recording(folder))
    assert report.divergence is None, str(report.divergence)
    assert report.num_events > 500
    assert report.last_step_id == run.world.scheduler.last_step_id


def test_a_segment_without_a_snapshot_says_where_to_begin(tmp_path: Path) -> None:
    run = Run(tmp_path / "r", "begin", is_masked=False, max_bytes=16 * 20_000)
    while len(segments.numbers(run.folder)) < 2:
        run.act(40)
    run.close()
    with pytest.raises(NotReplayable, match=r"segment 2 .* has no snapshot: begin with the first"):
        replay(Recording(segments.segment_path(run.folder, 2)))
    segments.segment_path(run.folder, 1).rename(tmp_path / "elsewhere")
    with pytest.raises(NotReplayable, match=r"segment 2 .* has no snapshot"):
        replay(Recording(run.folder))


def test_a_full_disk_stops_the_recording_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path / "r", "full", is_masked=False)

    class Full:
        def write(self, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            pass

        def close(self) -> None:
            pass

    run.act(50)
    wait_until(run.recorder._queue.empty)
    run.recorder._writer._file.close()
    run.recorder._writer._file = Full()  # type: ignore[assignment]
    run.act(200)
    run.recorder.close()
    assert "No space left" in run.recorder.why_stopped
    report = replay(Recording(run.folder))
    assert report.divergence is None
    assert 0 < report.num_events < len(run.calls)


def test_what_cannot_be_written_stops_the_recording_by_name(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", header_for(SMALL, None), None, RecordingLimits(MIB))
    request = replace(make_request("a", 3), sampling=lambda: None)
    recorder.tap("add", (request,), None, None)
    recorder.close()
    assert "function cannot be recorded" in recorder.why_stopped


def test_old_recordings_make_room_unless_somebody_writes_them(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        segments.segment_path(folder, 1).write_bytes(bytes(1000))
    claim = segments.Claim(tmp_path / "a")
    assert segments.prune(tmp_path, 2000) == [tmp_path / "b"]
    claim.release()
    assert segments.prune(tmp_path, 1500) == [tmp_path / "a"]
    assert [path.name for path in segments.recordings(tmp_path)] == ["c"]


def test_stand_ins_keep_prefixes_apart_and_together() -> None:
    mask = Mask(vocab_size=1000, max_num_seqs=4, key=KEY)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 1000, 30).astype(np.int32)
    tails = [np.array([token], dtype=np.int32) for token in range(1000)]
    masked = [mask.tokens(np.append(shared, tail).astype(np.int32)) for tail in tails]
    assert all((m[:30] == masked[0][:30]).all() for m in masked)
    assert sorted(int(m[30]) for m in masked) == list(range(1000))  # none lost, none twice


def test_counting_stand_ins_tells_nothing_of_the_tokens() -> None:
    mask = Mask(vocab_size=1000, max_num_seqs=4, key=KEY)
    same = mask.tokens(np.full(20_000, 7, dtype=np.int32))
    counts = np.bincount(same, minlength=1000)
    assert counts.max() < 60 and (counts > 0).all()  # 20 of each on average
    other = Mask(vocab_size=1000, max_num_seqs=4, key=bytes(16))
    assert (other.tokens(np.full(100, 7, dtype=np.int32)) != same[:100]).mean() > 0.9


@pytest.mark.parametrize("is_masked", [False, True], ids=["kept", "replaced"])
def test_tokens_of_users_are_in_a_recording_exactly_when_they_are_kept(
    tmp_path: Path, is_masked: bool
) -> None:
    """Prompt, output, tokens of a preempted sequence, and lists in the sampling parameters."""
    mask = Mask(SMALL.vocab_size, SMALL.max_num_seqs, KEY) if is_masked else None
    recorder = Recorder(tmp_path / "r", header_for(SMALL, mask), mask, RecordingLimits(MIB))
    scheduler = TappedScheduler(SMALL, recorder.tap)
    prompt, output = [*range(100, 112)], [*range(800, 812)]
    words, named = ((711, 712, 713),), (721, 722, 723)
    sampling = Sampling(
        0.0, 1.0, 0, 0.0, seed=1, bad_words_token_ids=words, logprob_token_ids=named
    )
    named_session = SessionHint("whose session", "whose parent")
    scheduler.add(
        make_request(
            "a",
            prompt,
            sampling=sampling,
            stop_token_ids=(output[-1],),
            session=named_session,
            cache_salt="whose salt",
        )
    )
    for token_id in output[:6]:
        step(scheduler, token_id)
    scheduler.worker_lost()
    for token_id in output[6:]:
        step(scheduler, token_id)
    assert scheduler.num_finished == 1
    scheduler.end_session("whose end", "whose salt")
    recorder.close()
    assert recorder.why_stopped == ""
    content = b"".join(path.read_bytes() for path in recorder.folder.iterdir())
    secrets = [prompt[:4], prompt[8:], output[:4], output[4:6]]
    found = [pack(secret) in content for secret in secrets]
    assert found == [not is_masked] * len(secrets)
    for listed in (b"711, 712, 713", b"721, 722, 723", b"whose"):
        assert (listed in content) is not is_masked
    assert replay(Recording(recorder.folder)).divergence is None


def test_the_command_names_the_first_plan_that_a_change_of_code_changes(recorded: Path) -> None:
    """The unchanged core replays; one that admits by another rule does not."""
    command = [sys.executable, "-m", "scheduler_svc.journal", str(recorded)]
    equal = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=patience(60)
    )
    assert equal.returncode == 0, equal.stderr
    assert "every plan is equal" in equal.stdout
    changed = (
        "import sys\n"
        "from scheduler_svc.core.step.state import SchedulerState\n"
        "clear = SchedulerState.clear\n"
        "def other(self, *blocks):\n"
        "    clear(self, *blocks)\n"
        "    self.free_slots.reverse()\n"
        "SchedulerState.clear = other\n"
        "from scheduler_svc.journal.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", changed, str(recorded)]
    differs = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=patience(60)
    )
    assert differs.returncode == 1, differs.stderr
    assert "schedule of step 1): step.new_sequences[0].slot differs" in differs.stdout
    assert "recorded: 0" in differs.stdout
