"""Adapters whose tokens are known from the merged model: lora_r8 and lora_rs16."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.engine import Engine
from tests.worker_svc.adapters.peft_folders import GOLDEN, GOLDEN_BASE, save_golden
from tests.worker_svc.adapters.served_adapters import adapters_of, generate_by
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, serving
from tests.worker_svc.transformers_models.test_served import under_a_scheduler
from worker_svc.adapters.options import AdapterModule
from worker_svc.models import compiled

SHORT = [5, 17, 99, 3, 42, 7, 88]
LONG = [(37 * i + 11) % 160 for i in range(40)]
TOKENS = {
    GOLDEN_BASE: (
        [71, 155, 54, 4, 101, 154, 100, 54, 134, 93, 51, 59],
        [30, 75, 79, 96, 57, 51, 105, 18, 83, 140, 145, 61],
    ),
    "lora_r8": (
        [107, 10, 86, 40, 53, 4, 125, 62, 30, 68, 71, 121],
        [29, 51, 22, 158, 125, 0, 29, 56, 58, 30, 138, 134],
    ),
    "lora_rs16": (
        [134, 13, 37, 94, 109, 57, 44, 57, 116, 75, 103, 73],
        [22, 72, 132, 3, 36, 59, 74, 37, 101, 97, 2, 60],
    ),
}


@pytest.fixture(scope="module", params=["c", "torch"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    folders = save_golden(tmp_path_factory.mktemp("golden"))
    modules = tuple(AdapterModule(name, str(folders[name])) for name in GOLDEN)
    config = replace(WORKER_CONFIG, lora_modules=modules)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(compiled, "supports", lambda *_: False)
        with serving(config, folders[GOLDEN_BASE]) as found:
            backend = found.describe().description.attention_backend
            assert backend.startswith(request.param)
            yield found


async def test_tokens_are_those_of_the_merged_models(worker: Worker) -> None:
    adapters = adapters_of(worker)

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        return [
            await generate_by(stub, adapters.get(name), prompt, 12)
            for name in TOKENS
            for prompt in (SHORT, LONG, LONG)  # the last after a cached prefix
        ]

    found, engine = await under_a_scheduler(worker, each)
    assert found == [tokens for short, long in TOKENS.values() for tokens in (short, long, long)]
    (group,) = engine.groups
    assert group.core is not None
    # 32 of 40 tokens are whole blocks of 16; each adapter hits its own alone.
    assert group.core.counters.prefix_hit_tokens == 3 * 32
