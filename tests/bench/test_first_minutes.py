"""The first minutes: a step that fails fails the script, and the document is the script's own."""

import sys
from pathlib import Path

import pytest

from bench.first_minutes import fresh, recording
from bench.first_minutes.__main__ import Time, answered, ports
from bench.first_minutes.recording import RecordedStep, Running

DOCUMENT = Path(__file__).parents[2] / "docs" / "first-minutes.md"


def test_the_recording_has_every_step_of_the_script_and_no_path_of_a_machine() -> None:
    recorded = DOCUMENT.read_text()
    for step in (*recording.INSTALL, recording.UP, *recording.TALK):
        before, _, after = step.line.partition("{wheel}")
        assert f"$ {before}" in recorded and after in recorded
        assert step.expected in recorded
    assert recorded.startswith(recording.HEADING)
    assert "~/demo" in recorded
    for home in ("/tmp/", "/root/", "/home/", "/work/"):
        assert home not in recorded.replace("~/demo/tmp/", "")


def test_a_step_that_fails_fails_the_recording(tmp_path: Path) -> None:
    variables = fresh.environment(tmp_path)
    assert fresh.run("echo hello", tmp_path, variables).output == "hello\n"
    with pytest.raises(fresh.StepFailed, match="echo no; false: status 1\nno"):
        fresh.run("echo no; false", tmp_path, variables)
    step = RecordedStep("", "echo hello", "goodbye")
    with pytest.raises(fresh.StepFailed, match="no 'goodbye'"):
        recording._typed(step, Path("x.whl"), tmp_path, variables)


def test_nothing_is_written_if_a_step_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(home: Path) -> str:
        raise fresh.StepFailed(f"pagewire up: status 1 in {home.name}")

    document = tmp_path / "document.md"
    assert recording.main([str(document)], failing) == 1
    assert not document.exists()
    assert "pagewire up: status 1" in capsys.readouterr().err


def test_a_command_that_goes_on_is_waited_for_and_stopped(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import time\ntry:\n print('Ready.', flush=True)\n time.sleep(600)\n"
        "except KeyboardInterrupt:\n print('stopped')\n"
    )
    running = Running(f"{sys.executable} {script}", tmp_path, fresh.environment(tmp_path))
    try:
        assert running.wait_for("Ready.") == "Ready.\n"
        assert running.interrupt() == "stopped\n"
    finally:
        running.kill()


def test_a_command_that_ends_before_it_is_ready_fails(tmp_path: Path) -> None:
    running = Running(f"{sys.executable} -c print(1)", tmp_path, fresh.environment(tmp_path))
    try:
        with pytest.raises(fresh.StepFailed, match=r"no 'Ready\.'"):
            running.wait_for("Ready.")
    finally:
        running.kill()


def test_caches_are_new_and_this_environment_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    variables = fresh.environment(tmp_path)
    assert {"PYTHONPATH", "PAGEWIRE_API_KEY"} & set(variables) == set()
    for name in ("PIP_CACHE_DIR", "PAGEWIRE_CACHE", "XDG_CACHE_HOME", "TMPDIR"):
        assert Path(variables[name]).is_relative_to(tmp_path)
    assert str(Path(sys.prefix) / "bin") not in variables["PATH"].split(":")


def test_a_time_over_its_limit_is_missed_and_an_output_without_the_answer_fails() -> None:
    assert str(Time("a start", 91.0, 90)).endswith("91.0 s  (at most 90 s, MISSED)")
    assert str(Time("a start", 89.0, 90)).endswith("89.0 s  (at most 90 s)")
    assert Time("another", 1000.0).is_met
    assert answered(fresh.Done("Tokyo.", 2.0)) == 2.0
    with pytest.raises(fresh.StepFailed):
        answered(fresh.Done("London.", 2.0))
    assert len(set(ports().split()[1::2])) == 4
