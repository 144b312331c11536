"""Cached blocks are found within their namespace alone, wherever a sequence comes from."""

from dataclasses import replace

import pytest

from scheduler_svc.core import Scheduler, Sequence
from scheduler_svc.core.request.block_hash import root_of
from tests.scheduler_svc.core.builders import SMALL, make_request

KINDS = ("", "fp8_e4m3", "fp8_e5m2")


def scheduler_of(kind: str) -> Scheduler:
    return Scheduler(replace(SMALL, hash_namespace=kind))


def roots(scheduler: Scheduler) -> list[int]:
    return [sequence.root for sequence in scheduler.internal_state.waiting]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_an_added_sequence_has_the_namespace_of_its_scheduler(kind: str, salt: str) -> None:
    scheduler = scheduler_of(kind)
    scheduler.add(make_request("a", 9, cache_salt=salt))
    assert roots(scheduler) == [root_of(salt, kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_moves_takes_the_namespace_of_where_it_goes(kind: str) -> None:
    source, target = scheduler_of("other"), scheduler_of(kind)
    source.add(make_request("a", 9))
    for sequence in source.migration.migrate_out():
        target.migration.migrate_in(sequence)
    assert roots(target) == [root_of("", kind)]


def test_a_namespace_is_part_of_a_probe_and_no_longer_than_the_hash_takes() -> None:
    probe = Sequence(make_request("a", 9), 0, (), namespace="fp8_e4m3")
    assert probe.root == root_of("", "fp8_e4m3")
    with pytest.raises(ValueError, match="hash_namespace is longer than 16 bytes"):
        replace(SMALL, hash_namespace="x" * 17)
