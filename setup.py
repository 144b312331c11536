"""Adds the services to the wheel, below `pagewire/_services/`; pyproject.toml holds all the rest.

Their packages are called `gateway`, `wire`, `kernels` and so on. At the top of an environment such
names would clash with other distributions, so only the processes of the services have this folder
on their path (docs/decisions/0014-services-travel-inside-the-package.md).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SERVICES = (
    *("gateway", "scheduler_svc", "worker_svc"),
    *("default_model", "kernels", "simulator", "wire"),
)


class BuildWithServices(build_py):
    """Copies the services next to the client; an editable install has them in its checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib) / "pagewire" / "_services"
        shutil.rmtree(shipped, ignore_errors=True)  # of an earlier build
        for name in SERVICES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, shipped / name, ignore=ignored)


setup(cmdclass={"build_py": BuildWithServices})
