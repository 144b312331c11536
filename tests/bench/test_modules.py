"""Every benchmark can be imported, even if it then needs a device, and is listed."""

import importlib
import pkgutil
import subprocess
from pathlib import Path

import bench

ROOT = Path(__file__).parents[2]


def test_every_module_imports() -> None:
    names = [found.name for found in pkgutil.walk_packages(bench.__path__, "bench.")]
    assert len(names) > 20
    for name in names:
        importlib.import_module(name)


def test_make_bench_lists_every_command_with_a_line() -> None:
    listed = subprocess.run(
        ["make", "-s", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [path.relative_to(ROOT) for path in (ROOT / "bench").rglob("*.py")]
    commands = {
        ".".join(path.with_suffix("").parts).removesuffix(".__main__")
        for path in paths
        if '\nif __name__ == "__main__":' in (ROOT / path).read_text()
    }
    assert {line.split()[0] for line in listed} == commands
    assert all(len(line.split()) > 3 for line in listed), "each says what it does"
