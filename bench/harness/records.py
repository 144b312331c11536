"""Writes benchmark results as JSON lines that say where and how they were measured."""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.services import commit, hardware

LIBRARIES = ("torch", "triton", "grpcio", "protobuf", "numpy", "safetensors")

STDOUT = "-"


def environment(command: Sequence[str]) -> dict[str, object]:
    """The environment needed to judge or repeat a measurement."""
    return {
        "gpus": _gpus(),
        "cpu": hardware(),
        "load_before": round(os.getloadavg()[0], 2),  # above zero: other processes were running
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit(),
        "command": shlex.join(command),
    }


def new_parser(module: str, document: str) -> argparse.ArgumentParser:
    """The parser of a command: its help is the module's document, and options have one spelling."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=document, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the --json option of every `pagewire bench`."""
    parser.add_argument(
        "--json",
        metavar="PATH",
        nargs="?",
        const=STDOUT,
        help="append a JSON line per result to this file; - or nothing: to stdout, text to stderr",
    )


class Results:
    """Writes results as text, and as JSON lines if requested."""

    def __init__(self, path: str | None, command: Sequence[str]) -> None:
        self._path = path
        self._environment = environment(command) if path else {}

    def say(self, text: str) -> None:
        """Prints text."""
        print(text, file=sys.stderr if self._path == STDOUT else sys.stdout, flush=True)

    def add(self, benchmark: str, result: Mapping[str, object]) -> None:
        """Writes the line of one result."""
        if self._path is None:
            return
        values = {"benchmark": benchmark, **result, "environment": self._environment}
        line = json.dumps(values) + "\n"
        if self._path == STDOUT:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            with Path(self._path).open("a", encoding="utf-8") as lines:
                lines.write(line)


def spread(values: Sequence[float], digits: int) -> dict[str, object]:
    """The median of repeated measurements, and all values."""
    median, *each = (
        round(value, digits) if digits else round(value)
        for value in (statistics.median(values), *values)
    )
    return {"median": median, "each": each}


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU; empty without any."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return ran.stdout.strip().splitlines()


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
