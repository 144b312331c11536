"""Workers whose KV caches are of different types: their blocks are never taken for each other's."""

from dataclasses import replace

import pytest

from scheduler_svc.config import parse
from scheduler_svc.core.request.block_hash import root_of
from scheduler_svc.core_config import check_successor, core_config
from scheduler_svc.worker.served import WrongWorker
from simulator.workers.fake_worker import FakeModel, describe

CONFIG = parse(["--worker", "127.0.0.1:1"])
PLAIN, E4M3, E5M2 = (FakeModel(kv_dtype=kind) for kind in ("float32", "fp8_e4m3", "fp8_e5m2"))


def namespace(model: FakeModel) -> str:
    return core_config(CONFIG, describe(model, 1)).hash_namespace


def test_the_namespace_is_the_type_where_that_is_not_the_models() -> None:
    assert [namespace(model) for model in (PLAIN, E4M3, E5M2)] == ["", "fp8_e4m3", "fp8_e5m2"]
    assert namespace(replace(PLAIN, kv_dtype="")) == ""  # an older worker does not say
    assert len({root_of("", namespace(model)) for model in (PLAIN, E4M3, E5M2)}) == 3


@pytest.mark.parametrize("before", [PLAIN, E4M3, E5M2], ids=lambda model: model.kv_dtype)
@pytest.mark.parametrize("after", [PLAIN, E4M3, E5M2], ids=lambda model: model.kv_dtype)
def test_a_group_goes_on_with_a_worker_of_the_same_type_alone(before, after) -> None:
    config, worker = core_config(CONFIG, describe(before, 1)), describe(after, 2)
    if before == after:
        check_successor(config, worker)
        return
    with pytest.raises(WrongWorker, match=f"its kv_dtype, {after.kv_dtype}, differs"):
        check_successor(config, worker)
