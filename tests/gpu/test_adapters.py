"""Adapters on a GPU: tokens of merged models, in graphs and kernel by kernel."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler_svc.engine import Engine
from tests.worker_svc.adapters import test_merged
from tests.worker_svc.adapters.peft_folders import MadeAdapter
from tests.worker_svc.adapters.served_adapters import adapters_of, generate_by
from tests.worker_svc.adapters.test_merged import (
    FAMILIES,
    NUM_ADAPTERS,
    SHAPE,
    Made,
    adapters_for,
    prompt_of,
    serving_merged,
)
from tests.worker_svc.adapters.test_ranks_and_few_bits import check_few_bits
from tests.worker_svc.conftest import WORKER_CONFIG, serving
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.transformers_models.test_served import under_a_scheduler
from worker_svc.adapters.options import AdapterModule
from worker_svc.runner.cuda_runner import ComputePlan, CudaRunner

pytestmark = pytest.mark.gpu

ON_GPU = replace(WORKER_CONFIG, device="cuda")


@pytest.fixture(scope="module", params=FAMILIES)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    with serving_merged(request.param, tmp_path_factory.mktemp("merged"), ON_GPU) as one:
        runner = one.worker.server.lifecycle.runner
        assert isinstance(runner, CudaRunner)
        assert runner._model.fused is not None
        yield one


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched kernel by kernel."""
    plan = ComputePlan(is_plain=False, adapts=True)
    monkeypatch.setattr(CudaRunner, "_plan", lambda *args: plan)


test_twenty_adapters_alone = test_merged.test_twenty_adapters_alone
test_one_batch = test_merged.test_sixteen_adapters_and_rows_without_in_one_batch
test_twenty_adapters_where_a_step_may_have_sixteen = (
    test_merged.test_twenty_adapters_where_a_step_may_have_sixteen
)
test_after_preemptions_and_a_lost_stream = test_merged.test_after_preemptions_and_a_lost_stream
test_drafts_of_the_model_alone_change_no_token = (
    test_merged.test_drafts_of_the_model_alone_change_no_token
)
test_a_prefix_is_shared_within_an_adapter_and_never_between = (
    test_merged.test_a_prefix_is_shared_within_an_adapter_and_never_between
)


@pytest.mark.usefixtures("by_kernels")
async def test_one_batch_without_graphs(made: Made) -> None:
    await test_one_batch(made)


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block"])
async def test_weights_in_few_bits(name: str, tmp_path: Path) -> None:
    await check_few_bits(name, tmp_path, ON_GPU)


@torch.inference_mode()
def clear_winner(model: Any, prompt: list[int]) -> int | None:
    """The token after a prompt; None where rounded numbers may prefer another."""
    logits = model(torch.tensor([prompt])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return int(logits.argmax()) if first - second > 0.25 * float(logits.std()) else None


async def test_in_bfloat16_clear_winners_are_those_of_merged_weights(tmp_path: Path) -> None:
    family, changes = FAMILIES["qwen3"]
    model = save_random_model(tmp_path / "base", family, SHAPE | changes)
    made: dict[str, MadeAdapter] = adapters_for(model, tmp_path)
    wanted: dict[tuple[str, int], int] = {}
    for seed, name in enumerate([*made, ""]):
        merged = made[name].merged(model) if name else model
        for prompt in (seed, seed + 100, seed + 200):
            if (token := clear_winner(merged, prompt_of(prompt))) is not None:
                wanted[name, prompt] = token
    assert len(wanted) > NUM_ADAPTERS
    config = replace(
        ON_GPU,
        dtype="bfloat16",
        lora_modules=tuple(AdapterModule(name, str(tmp_path / name)) for name in made),
        max_lora_rank=32,
    )
    with serving(config, tmp_path / "base") as worker:
        known = adapters_of(worker)

        async def each(engine: Engine, stub: Any) -> list[list[int]]:
            return [
                await generate_by(stub, known.get(name), prompt_of(seed), 1)
                for name, seed in wanted
            ]

        found, _ = await under_a_scheduler(worker, each, max_num_seqs=4)
    different = [key for key, (token,) in zip(wanted, found, strict=True) if token != wanted[key]]
    assert different == []
