"""A hub on this machine, and commands that know no other."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.forks import command
from tests.e2e.forks.warm import LIBRARIES
from tests.pace import patience
from tests.pagewire.hub.stand_in import Hub, running_hub

ROOT = Path(__file__).parents[3]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has this hub, an empty cache and no token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}


@pytest.fixture
def run(environ: dict[str, str]) -> Run:
    def run_python(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """A Python process to its end; a fork, where that has the libraries of its module."""
        if arguments[0] == "-m" and arguments[1] in LIBRARIES:
            started = command.start(arguments[1], arguments[2:], ROOT, environ | variables)
            said = started.communicate(timeout=patience(60))
            return subprocess.CompletedProcess(arguments, started.wait(), *said)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environ | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(60),
        )

    return run_python
