"""Recordings of an earlier core replay on this one, plan for plan.

They were made by the random walks of the commit before blocks had an identity beyond their tokens:
with swaps and salvages, with a sliding window of 10, and with grammars and migrations.
"""

import lzma
from pathlib import Path

import pytest

from scheduler_svc.journal import segments
from scheduler_svc.journal.recording import Recording
from scheduler_svc.journal.replay import replay

OLDER = sorted(Path(__file__).with_name("older").glob("*.journal.xz"))


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.name.partition(".")[0])
def test_a_recording_of_an_earlier_core_replays(path: Path, tmp_path: Path) -> None:
    segments.segment_path(tmp_path, 1).write_bytes(lzma.decompress(path.read_bytes()))
    report = replay(Recording(tmp_path))
    assert report.divergence is None, str(report.divergence)
    assert report.num_steps > 50 and report.num_tokens > 50


def test_there_are_some() -> None:
    assert [path.name.partition(".")[0] for path in OLDER] == ["grammars", "swaps", "window"]
