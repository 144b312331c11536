"""Every import contract of pyproject.toml fails on an import that it forbids."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_repository import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
NAMES = [contract["name"] for contract in SETTINGS["contracts"]]
# By contract: a file, and a module that it must not import.
PLANTS = {
    "Services never import each other; the contracts and the kernels sit below": (
        "gateway/errors/request_errors.py",
        "scheduler_svc.config",
    ),
    "The simulator drives the scheduler, and no other service": (
        "simulator/simulate.py",
        "gateway.errors.request_errors",
    ),
    "Only the worker touches kernels": ("scheduler_svc/engine.py", "kernels.pdl"),
    "The scheduler core does no IO and reads no clock": (
        "scheduler_svc/core/kv/slots.py",
        "time",
    ),
    "Gateway, scheduler and SDK run without torch": ("gateway/errors/limits.py", "torch"),
    "The worker knows no text": ("worker_svc/config.py", "tokenizers"),
    "The rooms of the worker": ("worker_svc/models/layers.py", "worker_svc.runner.inputs"),
    "The rooms of the scheduler's core": (
        "scheduler_svc/core/kv/block_pool.py",
        "scheduler_svc.core.step.plan",
    ),
    "The rooms of the scheduler's shell": ("scheduler_svc/convert.py", "scheduler_svc.group"),
    "The rooms of the gateway": ("gateway/text/stops.py", "gateway.pipeline.pipeline"),
    "The rooms of the kernels": ("kernels/norm/rms_norm.py", "kernels.gemm.linear"),
    "The rooms of the simulator": ("simulator/workers/slots.py", "simulator.chaos.story"),
    "The SDK knows nothing of its command, and its messages nothing of channels": (
        "pagewire/_messages/fields.py",
        "pagewire._client",
    ),
    "Benchmarks share the harness, which knows none of them": (
        "bench/harness/client.py",
        "bench.plot",
    ),
}


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    if not program.is_file():
        pytest.skip("import-linter is not installed next to this Python")
    return subprocess.run(
        [program, "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": str(tree), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of lint-imports on a copy in which every contract is broken once."""
    tree = tmp_path_factory.mktemp("planted")
    ignored = shutil.ignore_patterns("__pycache__")
    for package in SETTINGS["root_packages"]:
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for name, module in PLANTS.values():
        with (tree / name).open("a") as file:
            file.write(f"import {module}\n")
    ran = lint(tree)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


def test_every_contract_has_an_import_that_it_forbids() -> None:
    assert sorted(PLANTS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_forbidden_import_breaks_the_contract(report: str, name: str) -> None:
    file, module = PLANTS[name]
    importer = file.removesuffix(".py").replace("/", ".")
    line = len((ROOT / file).read_text().splitlines()) + 1
    broken = report.partition("Broken contracts")[2].partition(f"\n{name}\n")[2]
    section = broken.lstrip("-").partition("\n---")[0]
    assert f"{importer} -> {module} (l.{line})" in section
