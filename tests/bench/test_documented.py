"""A part that fails is named, the others run, and one that hangs is stopped with its children."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import documented
from bench.documented import DocumentedBench, run_all
from tests.pace import patience

HANGS = """
import contextlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with contextlib.ExitStack() as on:
    on.callback(child.wait)
    on.callback(child.kill)
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_part_that_fails_is_named_and_the_others_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    chosen = [
        DocumentedBench("bad", "no_such_benchmark", "tiny"),
        DocumentedBench(
            "good", "harness.bars", "tiny"
        ),  # has no command line: it runs and ends well
        DocumentedBench("without a model", "harness.bars", None, ("--only", "decode")),
    ]
    assert run_all(chosen, "results.jsonl", {}) == ["bad"]
    told = capfd.readouterr().err
    assert "$ python -m bench.harness.checkpoints --shape tiny" in told
    assert "$ python -m bench.harness.bars --shape tiny --model" in told
    assert f"$ python -m bench.harness.bars --json {Path.cwd()}/results.jsonl --only decode" in told
    assert f"--json {Path.cwd()}/results.jsonl" in told  # parts run elsewhere


def test_what_is_stopped_ends_as_by_ctrl_c_and_cleans_up() -> None:
    command = [sys.executable, "-c", HANGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        started_s = time.monotonic()
        documented.stop(child)
        assert child.returncode != 0
        # The pipe ends with the last process that holds it, so the grandchild has ended, too.
        assert child.stdout.read() == b""
        assert time.monotonic() - started_s < patience(30)
