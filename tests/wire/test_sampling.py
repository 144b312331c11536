"""Sampling numbers mean the same to all services: their ranges, and when a temperature is 0."""

import ast
import math
from pathlib import Path

import pytest

from gateway.errors.request_errors import RequestError
from gateway.request import generation
from pagewire.v1 import types_pb2
from scheduler_svc import sampling
from wire.sampling import NUMBERS

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


def test_the_greedy_threshold_is_defined_once_for_services_and_once_for_kernels() -> None:
    found = thresholds()
    assert set(found) == DEFINITIONS
    assert set(found.values()) == {1e-5}


def is_taken(name: str, value: float) -> tuple[bool, bool]:
    """True for the gateway, and for the scheduler, if it takes the number."""
    taken = []
    asked = generation.SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = types_pb2.SamplingParams(**{name: value})  # type: ignore[arg-type]
    for check in (lambda: asked.check(100), lambda: sampling.resolve(message, 0, 100)):
        try:
            check()
        except (RequestError, sampling.BadSampling) as error:
            assert name in str(error)
            taken.append(False)
        else:
            taken.append(True)
    return taken[0], taken[1]


@pytest.mark.parametrize("name", NUMBERS)
def test_gateway_and_scheduler_take_a_number_up_to_the_edges_of_its_range(name: str) -> None:
    number = NUMBERS[name]
    is_whole = name == "top_k"
    lowest = 1e-37 if number.is_open_below else number.low
    for value in (*number.off, lowest, number.high):
        assert is_taken(name, value) == (True, True), value
    below = number.low if number.is_open_below else number.low - (1 if is_whole else 1e-3)
    # Above, a whole number has no room in its column.
    for value in (below,) if is_whole else (below, number.high * 1.0001, math.nan, math.inf):
        assert is_taken(name, value) == (False, False), value
