"""The number of gateways that `pagewire up` starts."""

import os

import pytest

from pagewire.cli.launcher import up
from pagewire.cli.launcher.services import choose_gateway_processes


@pytest.mark.parametrize(
    ("num_cores", "num_processes"),
    [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (128, 4)],
)
def test_several_gateways_where_cores_are_left(num_cores: int, num_processes: int) -> None:
    assert choose_gateway_processes(num_cores) == num_processes


@pytest.mark.parametrize("given", ["--processes 3", "--processes=3", "--store-responses 8"])
def test_a_given_number_of_gateways_is_left_alone(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert up._gateway_processes(given.split()) == ()
    assert up._gateway_processes(["--api-key", "x"]) == ("--processes", "4")
