"""The examples of docs/observability.md, as they stand there, against running services."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.cli.launcher.options.up_options import add_options
from tests.e2e.conftest import ROOT, environment_of_users
from tests.e2e.observe.conftest import Observed
from tests.pace import patience

TEXT = (ROOT / "docs/observability.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of each command of a program."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line))[0] == program]


def test_a_request_by_curl_arrives_under_the_trace_of_its_header(observed: Observed) -> None:
    (words,) = commands("curl")
    words = [word.replace("http://localhost:8000", observed.product.url) for word in words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience(60), check=True)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 16
    (header,) = [word for word in words if word.startswith("traceparent: ")]
    observed.sink.wait_for(header.split("-")[1], lambda names: ("worker", "compute") in names)


def test_the_recording_is_written_where_the_command_says(
    observed: Observed, tmp_path: Path
) -> None:
    (words,) = [words for words in commands("pagewire") if words[1] == "profile"]
    address = f"127.0.0.1:{observed.product.scheduler_port}"
    recording = subprocess.Popen(
        [sys.executable, "-m", "pagewire", *words[1:], "--scheduler", address],
        cwd=tmp_path,
        env=environment_of_users(PYTHONPATH=str(ROOT)),
    )
    while recording.poll() is None:
        observed.complete(max_tokens=24)
    assert recording.returncode == 0
    trace = json.loads((tmp_path / words[words.index("--out") + 1]).read_text())
    assert trace["otherData"]["steps"] == int(words[words.index("--steps") + 1])


def test_up_knows_the_options_of_its_example() -> None:
    (words,) = [words for words in commands("pagewire") if words[1] == "up"]
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(words[2:])
    assert (options.otlp_endpoint, options.trace_sample_ratio) == ("http://localhost:4317", 0.1)


def test_the_line_of_json_has_the_fields_that_lines_have(observed: Observed) -> None:
    (block,) = blocks("json")
    documented = json.loads(block)
    observed.complete({"traceparent": f"00-{'c' * 32}-{'d' * 16}-01"})
    ended = [
        line for line in observed.lines("gateway") if line["message"].startswith("an output ended")
    ]
    assert ended[-1].keys() == documented.keys()


@pytest.mark.parametrize("form", ["text", "fields"])
def test_the_line_of_a_step_is_as_documented(observed: Observed, form: str) -> None:
    observed.complete()
    (line,) = [
        line for line in observed.lines("scheduler_svc") if line["logger"] == "scheduler_svc.steps"
    ][-1:]
    (example,) = [block.strip() for block in blocks("text") if block.startswith("step ")]
    number = re.compile(r"\d+(\.\d+)?")
    if form == "text":
        assert number.sub("N", line["message"]) == number.sub("N", example)
    else:
        (names,) = re.findall(r"its numbers are fields \((.*?)\)", TEXT, re.DOTALL)
        assert set(re.findall(r"`(\w+)`", names)) <= line.keys()
