"""Results are lines with their origin; the commit is also known in an archive."""

import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench.harness import services
from bench.harness.records import Results, spread


def test_results_are_appended_as_lines_with_their_command(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"benchmark": "older"}\n')
    results = Results(str(path), ["python", "-m", "bench.some", "--name", "two words"])
    results.add("some", {"tokens_per_s": spread([3.0, 1.0, 2.0], 0)})
    older, line = map(json.loads, path.read_text().splitlines())
    assert older == {"benchmark": "older"}
    assert line["tokens_per_s"] == {"median": 2, "each": [3, 1, 2]}
    assert line["environment"]["command"] == "python -m bench.some --name 'two words'"
    assert line["environment"]["versions"]["python"]


def test_an_archive_says_of_which_commit_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (services.ROOT / ".git").exists():
        pytest.skip("not a checkout")
    archive = subprocess.run(
        ["git", "archive", "HEAD", "bench/archived_commit.txt"],
        cwd=services.ROOT,
        capture_output=True,
        check=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tmp_path, filter="data")
    here = services.commit()
    monkeypatch.setattr(services, "ROOT", tmp_path)
    monkeypatch.setattr(services, "ARCHIVED_COMMIT", tmp_path / "bench" / "archived_commit.txt")
    archived = services.commit()
    assert len(archived) >= 7
    assert here.startswith(archived)


def test_a_copy_that_is_no_archive_is_of_an_unknown_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "ROOT", tmp_path)
    assert services.commit() == "unknown"
