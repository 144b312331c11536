"""The threshold below which a temperature is 0 is one number for services and kernels."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Kernels import nothing of ours, so theirs is a second one; the test below compares it.
DEFINITIONS = {"wire/sampling.py", "kernels/sampling/slot_state.py"}


def thresholds() -> dict[str, float]:
    """By file: the number in its assignment to GREEDY_TEMPERATURE."""
    found = {}
    for folder in ("gateway", "kernels", "wire", "scheduler_svc", "simulator", "worker_svc"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(
                    "GREEDY"
                ):
                    numbers = [n for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                    found[path.relative_to(ROOT).as_posix()] = float(str(numbers[-1].value))
    return found


def _assigned(source: str) -> Iterator[float]:
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="GREEDY_TEMPERATURE")], value=value):
                numbers = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
                yield float(str(numbers[-1]))


def test_the_greedy_threshold_is_defined_once_for_services_and_once_for_kernels() -> None:
    found = thresholds()
    assert set(found) == DEFINITIONS
    assert set(found.values()) == {1e-5}
