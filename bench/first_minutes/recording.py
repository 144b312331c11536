"""Records a terminal from `pip install` to the first answers, as a document.

    python3 -m bench.first_minutes.recording docs/first-minutes.md

The steps run in an empty folder with empty caches, outside any checkout; the folder is called
~/demo in the recording. Exits with 1, and writes nothing, if a step fails or does not print what
it must. `pagewire up` needs its usual ports.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.first_minutes import fresh
from bench.harness.records import new_parser

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 90.0
QUIET_S = 1.0  # after which what was printed was all
QUESTION = "What is the capital of Japan?"


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A line that is typed, why, and a text that it must print."""

    why: str
    line: str
    expected: str = ""


INSTALL = (
    RecordedStep(
        "An environment, and the package with all that serving needs.",
        "python3 -m venv .venv && . .venv/bin/activate",
    ),
    RecordedStep("", 'pip install -qq -c constraints.txt "./{wheel}[serve]"'),
)
UP = RecordedStep("Three services, and a sample question.", "pagewire up", "Tokyo")
TALK = (
    RecordedStep("In a second terminal: what runs.", "pagewire status", "KV"),
    RecordedStep(
        "The OpenAI API.",
        "curl -s localhost:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'  -d \'{{"messages": [{{"role": "user", "content": "{QUESTION}"}}], "temperature": 0}}\'',
        "Tokyo",
    ),
    RecordedStep(
        "The Python client.",
        "python -c 'import pagewire; "
        f'print(pagewire.Client().chat("{QUESTION}", temperature=0).text)\'',
        "Tokyo",
    ),
)
HEADING = """# First minutes

A recording of a terminal, from `pip install` to the first answers, with empty caches. It is made by
`python3 -m bench.first_minutes.recording`, which fails if a step fails. The times of `make serve`
from a fresh clone are printed by `python3 -m bench.first_minutes`.
"""


class Running:
    """A command that goes on while others run, and what it has printed."""

    def __init__(self, line: str, cwd: Path, variables: Mapping[str, str]) -> None:
        self._line = line
        self._parts: list[str] = []
        self._process = subprocess.Popen(
            line.split(),
            cwd=cwd,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._parts.append(line)

    @property
    def output(self) -> str:
        """Everything so far."""
        return "".join(self._parts)

    def wait_for(self, text: str) -> str:
        """All it prints until `text` has come and nothing more does. Raises StepFailed."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while text not in self.output:
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise fresh.StepFailed(f"{self._line}: no {text!r}\n{self.output}")
            time.sleep(0.1)
        return self._settled()

    def _settled(self) -> str:
        while True:
            before = len(self.output)
            time.sleep(QUIET_S)
            if len(self.output) == before:
                return self.output

    def interrupt(self) -> str:
        """Sends Ctrl-C; what it prints then. Raises StepFailed unless it ends well."""
        before = len(self.output)
        self._process.send_signal(signal.SIGINT)
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise fresh.StepFailed(f"{self._line}: does not stop\n{self.output}") from None
        self._reader.join()
        if status:
            raise fresh.StepFailed(f"{self._line}: status {status}\n{self.output}")
        return self.output[before:]

    def kill(self) -> None:
        """Ends it, if it still runs; its services end with it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


def record(home: Path) -> str:
    """Runs all steps; returns the document. Raises StepFailed."""
    variables = fresh.environment(home)
    wheel = fresh.build_wheel(home, variables)
    fresh.run("cp clone/constraints.txt . && rm -rf clone", home, variables)
    load = (
        f"Made on {os.cpu_count()} cores with a load average of {os.getloadavg()[0]:.1f} before.\n"
    )
    parts = [HEADING, load, *(_typed(step, wheel, home, variables) for step in INSTALL)]
    began_s = time.perf_counter()
    up = Running(UP.line, home, variables)
    try:
        said = up.wait_for("Ready.")
        _check(UP, said)
        seconds = time.perf_counter() - began_s - QUIET_S
        parts.append(_block(UP, UP.line, fresh.Done(said, seconds)))
        parts += [_typed(step, wheel, home, variables) for step in TALK]
        parts.append(_block(RecordedStep("Ctrl-C in the first.", "^C"), "^C", up.interrupt()))
    finally:
        up.kill()
    return neutral("\n".join(parts), home)


def _typed(step: RecordedStep, wheel: Path, home: Path, variables: Mapping[str, str]) -> str:
    line = step.line.replace("{wheel}", wheel.name)
    done = fresh.run(line, home, variables)
    _check(step, done.output)
    return _block(step, line, done)


def _check(step: RecordedStep, output: str) -> None:
    if step.expected not in output:
        raise fresh.StepFailed(f"{step.line}: no {step.expected!r}\n{output}")


def _block(step: RecordedStep, line: str, done: fresh.Done | str) -> str:
    """A step as Markdown: why, then the terminal."""
    output = done if isinstance(done, str) else done.output
    took = "" if isinstance(done, str) or done.seconds < 1 else f"\n({done.seconds:.0f} s)"
    prompt = line if line == "^C" else f"$ {line}"
    shown = f"{prompt}\n{output.strip()}".rstrip()
    return f"{step.why}\n\n```text\n{shown}{took}\n```\n".lstrip("\n")


def neutral(text: str, home: Path) -> str:
    """The text without this machine's paths."""
    return re.sub(re.escape(str(home)), "~/demo", text)


def main(arguments: Sequence[str], make: Callable[[Path], str] = record) -> int:
    """Records and writes the document."""
    parser = new_parser("bench.first_minutes.recording", __doc__)
    parser.add_argument("document", type=Path)
    options = parser.parse_args(arguments)
    with fresh.folder() as home:
        try:
            document = make(home)
        except fresh.StepFailed as error:
            sys.stderr.write(f"{error}\n")
            return 1
    options.document.write_text(document)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
