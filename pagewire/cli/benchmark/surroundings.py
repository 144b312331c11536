"""The environment of a measurement: machine, versions, commit."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import google.protobuf
import grpc

import pagewire

HERE = Path(__file__).resolve().parents[3]


def describe() -> dict[str, object]:
    """Machine, versions and commit of this process."""
    return {
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "versions": {
            "pagewire": pagewire.__version__,
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
            "protobuf": google.protobuf.__version__,
        },
        "commit": commit(),
        "command": ["pagewire", *sys.argv[1:]],
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The commit of the checkout this runs from, with "+" if changed; None outside of one."""
    if not (HERE / ".git").exists():
        return None  # an environment may lie in another project's checkout
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
