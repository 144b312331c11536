"""Wheels of this tree, and environments outside of it that hold one; no package index is asked."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.pace import patience
from tests.test_repository import files, relative

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
# What could make another process find this tree, or what tests set for themselves.
OWN_VARIABLES = {"PYTHONPATH", "PYTHONSAFEPATH", "OMP_NUM_THREADS", "CC"}


def build_wheel(folder: Path) -> Path:
    """Builds the wheel in `folder`, from a copy of the tree, so that the tree stays clean."""
    tree = folder / "tree"
    for path in files():
        if not relative(path).startswith(("tests/", "docs/", "bench/")):
            (tree / relative(path)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tree / relative(path))
    _run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir",
         str(folder / "dist"), str(tree))  # fmt: skip
    (wheel,) = (folder / "dist").iterdir()
    return wheel


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment without pip."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / name / "site-packages"

    def run(self, *line: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Runs `pagewire` as a user does who has never seen this tree."""
        kept = {name: text for name, text in os.environ.items() if name not in OWN_VARIABLES}
        return subprocess.run(
            [self.folder / "bin" / "pagewire", *line],
            cwd=cwd,
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=patience(120),
        )


def install(wheel: Path, folder: Path, *libraries: str) -> Environment:
    """A new environment with the wheel and libraries of this one: the named ones, or all.

    Its path ends with a folder of this environment. No .pth file is read there, so the checkout
    that is installed in it for development is not found.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder)
    shared = Path(sysconfig.get_path("purelib"))
    if libraries:
        shared = _linked(shared, folder / "libraries", libraries)
    (environment.site_packages / "libraries.pth").write_text(f"{shared}\n")
    python = str(folder / "bin" / "python")
    _run(*PIP, "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    return environment


def _linked(shared: Path, folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shared / name)
    return folder


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert ran.returncode == 0, ran.stdout + ran.stderr
