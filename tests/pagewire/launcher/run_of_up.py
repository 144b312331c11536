"""Runs of `pagewire up` as a process, in a checkout of services without a model."""

import json
import os
import threading
from pathlib import Path

from tests.e2e.forks import command
from tests.pace import patience
from tests.ports import free_port

NAMES = ("worker", "scheduler", "gateway")
PORT_OPTIONS = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")


class Up:
    """Runs of `pagewire up`, in a checkout of fakes unless there is another."""

    def __init__(self, folder: Path, checkout: Path | None = None) -> None:
        self.folder = folder
        self._checkout = checkout or folder
        self.ports = [free_port() for _ in PORT_OPTIONS]
        self._runs: list[command.Command] = []
        self._limits: list[threading.Timer] = []

    def start(self, *options: str, fake: str = "", **environ: str) -> command.Command:
        words = ["up", "--checkout", str(self._checkout)]
        for option, port in zip(PORT_OPTIONS, self.ports, strict=True):
            words += [option, str(port)]
        own = {"PAGEWIRE_CACHE": "", "XDG_CACHE_HOME": str(self.folder), "FAKE": fake}
        run = command.start(
            "pagewire",
            [*words, "--log-dir", str(self.folder / "logs"), *options],
            Path.cwd(),
            os.environ | own | environ,
        )
        self._runs.append(run)
        # What waits for its output then sees the end.
        limit = threading.Timer(patience(60), run.kill)
        limit.start()
        self._limits.append(limit)
        return run

    def finish(self, *options: str, fake: str = "", **environ: str) -> tuple[int, str, str]:
        run = self.start(*options, fake=fake, **environ)
        out, err = run.communicate(timeout=patience(60))
        return run.returncode, out, err

    def note(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.json").read_text())

    def pids(self) -> list[int]:
        """The ids of every service that came to its first line, and of its child processes."""
        begun = [name for name in NAMES if (self.folder / f"{name}.json").exists()]
        return [pid for name in begun for pid in self.note(name)["pids"]]

    def wait_for(self, run: command.Command, text: str) -> str:
        seen = ""
        for line in run.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"{text!r} never came, but:\n{seen}\n{run.stderr.read()}")

    def close(self) -> None:
        for limit in self._limits:
            limit.cancel()
        for run in self._runs:
            run.kill()
            run.communicate()
