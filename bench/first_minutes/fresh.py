"""A folder and an environment in which nothing has been installed, downloaded or compiled yet.

Only the standard library is used: these scripts run before anything is installed.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What could make a command find this tree, this Python's environment, or a key.
FOREIGN = {"PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV", "MAKEFLAGS", "PAGEWIRE_API_KEY"}
STEP_TIMEOUT_S = 1200.0


class StepFailed(RuntimeError):
    """Raised when a command fails, or does not say what it must."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that succeeded."""

    output: str  # stdout and stderr, as they came
    seconds: float


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, deleted after the block."""
    with tempfile.TemporaryDirectory(prefix="pagewire-first-minutes-") as made:
        yield Path(made).resolve()


def environment(home: Path) -> dict[str, str]:
    """Variables of a user whose caches are empty and whose environment is `home`/.venv.

    Where packages come from stays as this machine has it.
    """
    (home / "tmp").mkdir(exist_ok=True)
    kept = {name: text for name, text in os.environ.items() if name not in FOREIGN}
    own = Path(sys.prefix) / "bin"
    path = [part for part in kept["PATH"].split(os.pathsep) if Path(part) != own]
    return kept | {
        "PATH": os.pathsep.join([str(home / ".venv" / "bin"), *path]),
        "PIP_CACHE_DIR": str(home / "pip-cache"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PAGEWIRE_CACHE": str(home / "cache" / "pagewire"),
        "TMPDIR": str(home / "tmp"),
    }


def run(line: str, cwd: Path, variables: Mapping[str, str]) -> Done:
    """Runs a line of a shell to its end. Raises StepFailed with its output."""
    began_s = time.perf_counter()
    ran = subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_S,
    )
    if ran.returncode:
        raise StepFailed(f"{line}: status {ran.returncode}\n{ran.stdout}")
    return Done(ran.stdout, time.perf_counter() - began_s)


def clone(home: Path, variables: Mapping[str, str]) -> Path:
    """A clone of the last commit of this tree."""
    run(f"git clone --quiet '{ROOT}' clone", home, variables)
    return home / "clone"


def build_wheel(home: Path, variables: Mapping[str, str]) -> Path:
    """The wheel of the last commit, in `home`."""
    made = clone(home, variables)
    run(f"python3 -m pip wheel -qq --no-deps --wheel-dir '{home}' .", made, variables)
    (wheel,) = home.glob("pagewire-*.whl")
    return wheel
