"""The suite's order, the tests that share a process, and pairs in place of all combinations."""

from itertools import combinations
from pathlib import Path

import pytest

from tests import order, ports
from tests.pairs import pairwise

AXES = ("abcdefg", (1, 2, 8, 16, 32), (10, 20, 30, 40))
FIXTURE = "@pytest.fixture\ndef product(tiny_model: Path) -> Product: ...\n"
TAKEN = "def test_a(product: Product) -> None: ...\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TAKEN, "product"),
        ("async def test_a(tmp_path: Path, product: Product) -> None: ...\n", "product"),
        ("@pytest.fixture(scope='module')\ndef client(product: Product): ...\n", "product"),
        (TAKEN + "def test_b(tiny_product: Product) -> None: ...\n", "tiny_product"),
        (FIXTURE.replace("tiny_model: Path", "tiny_product") + TAKEN, "tiny_product"),
        (FIXTURE + TAKEN, ""),  # its own
        ("def ask(product: Product) -> str: ...\n", ""),  # a helper of tests with their own
    ],
)
def test_a_file_is_with_the_product_that_it_takes(source: str, expected: str) -> None:
    assert order.product_of(source) == expected


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("e2e/test_behaviour.py", "tiny_product"),
        ("e2e/test_greedy_oracle.py", "product"),
        ("e2e/observe/test_logs.py", "observed"),
        ("e2e/rolling/test_rolling_upgrade.py", "e2e/rolling/test_rolling_upgrade.py"),
        ("e2e/page/test_page_in_chromium.py", "network"),
        ("deploy/cluster/test_standin.py", "network"),
        ("kernels/cpu/test_cpu_bounds.py", "kernels/cpu"),
        ("gateway/http/test_http.py", "gateway/http/test_http.py"),
        ("e2e/test_dtypes.py", "e2e/test_dtypes.py::test_a[1]"),
    ],
)
def test_groups_of_this_suite(name: str, group: str) -> None:
    assert order.group_of(Path(order.TESTS / name), f"{name}::test_a[1]") == group


def test_files_and_folders_with_a_place_of_their_own_exist() -> None:
    named = {*order.APART, *order.LONG, *order.LONGEST, order.COMPILED, *order.RANKS}
    for name in named.difference(order.PRODUCTS):
        assert (order.TESTS / name).exists(), name
    stems = {path.stem for path in order.TESTS.rglob("test_*.py")}
    assert set(order.SLOW_FILES) <= stems
    assert all((order.TESTS / name).is_dir() for name in order.SLOW_FOLDERS)


def test_processes_of_a_run_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_given", set())
    taken = set[int]()
    for index in range(ports.PROCESSES):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{index}")
        own = {port + rank for port in ports._own_ports() for rank in range(ports.RANKS)}
        assert len(own) > 2000 and not own & taken
        taken |= own
        assert ports.free_port() in own
    assert min(taken) >= ports.FIRST and max(taken) < ports.LAST


def test_every_two_values_meet_in_fewer_cases_than_there_are_combinations() -> None:
    cases = pairwise(*AXES)
    for first, second in combinations(range(len(AXES)), 2):
        met = {(case[first], case[second]) for case in cases}
        assert len(met) == len(AXES[first]) * len(AXES[second])
    assert 35 <= len(cases) < 50  # of 140


def test_the_cases_are_the_same_in_every_process() -> None:
    assert pairwise(*AXES) == pairwise(*AXES)
