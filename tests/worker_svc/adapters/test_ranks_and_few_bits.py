"""Adapters over a model that ranks divide, and over weights in few bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker_svc.adapters.peft_folders import MadeAdapter, continued
from tests.worker_svc.adapters.served_adapters import adapters_of, generate_by
from tests.worker_svc.conftest import WORKER_CONFIG, make_prompt, serving
from tests.worker_svc.parallel.test_tensor_parallel import FAMILIES, SHAPE, on_ranks
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.transformers_models.test_served import under_a_scheduler
from wire.adapters import AdapterSource
from worker_svc.adapters.errors import BadAdapter
from worker_svc.adapters.options import AdapterModule
from worker_svc.adapters.store import AdapterOrder, AdapterOrders
from worker_svc.adapters.weights import LoadedAdapter
from worker_svc.config import WorkerConfig
from worker_svc.parallel.group import Group
from worker_svc.protocol.step import BadStep, NewSequence, StepInput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

NUM_TOKENS = 8
PROMPTS = [make_prompt(length, seed=length) for length in (20, 33, 7)]
MADE = (MadeAdapter(seed=1), MadeAdapter(("q_proj", "v_proj", "down_proj"), rank=3, seed=2))


def build(folder: Path, adapters: list[Path], group: Group) -> ModelRunner:
    """The runner of one rank; the names of its adapters are known to rank 0 alone."""
    modules = tuple(AdapterModule(path.name, str(path)) for path in adapters)
    config = replace(WORKER_CONFIG, lora_modules=modules)
    loaded = startup.load(config, folder, "float32", "", group)
    return startup.build_runner(config, loaded, num_blocks=64)


def entering(slot: int, preparation: int) -> NewSequence:
    prompt = np.array(PROMPTS[slot], dtype=np.int32)
    return NewSequence(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.arange(1, 4, dtype=np.int32) + 3 * slot,
        adapter_preparation=preparation,
    )


def tokens_of(runner: ModelRunner, sources: list[AdapterSource]) -> list[list[int]]:
    """The first row has the model alone, and each other one an adapter."""
    store = runner.state.adapters
    assert store is not None
    for number, source in enumerate(sources, start=1):
        store.fetch(AdapterOrder(number, source))  # and the step waits for it
    first = StepInput(
        step_id=1,
        reset=True,
        new_sequences=tuple(entering(slot, slot) for slot in range(3)),
        slots=np.arange(3),
        num_scheduled=np.array(list(map(len, PROMPTS))),
    )
    steps = [first, *(StepInput(n, same_rows=True) for n in range(2, NUM_TOKENS + 1))]
    outputs = [runner.execute(step) for step in steps]
    assert not any(output.error for output in outputs)
    return np.stack([output.token_ids for output in outputs], axis=1).tolist()


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama", 2), ("llama-biases", 4), ("qwen2-one-kv-head", 2), ("qwen3-tied", 2), ("gemma3", 2)],
)
def test_ranks_divide_an_adapter_as_the_layers_that_it_is_for(
    name: str, size: int, tmp_path: Path
) -> None:
    family, changes = FAMILIES[name]
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = save_random_model(tmp_path / "base", family, SHAPE | changes | none)
    adapters = [made.save(model, tmp_path / f"a{n}") for n, made in enumerate(MADE)]
    merged = [model, *(made.merged(model) for made in MADE)]
    wanted = [
        continued(one, prompt, NUM_TOKENS) for one, prompt in zip(merged, PROMPTS, strict=True)
    ]
    alone = build(tmp_path / "base", adapters, Group())
    assert alone.state.adapters is not None
    sources = list(alone.state.adapters.names.sources)
    found = on_ranks(
        size, lambda group: tokens_of(build(tmp_path / "base", adapters, group), sources)
    )
    assert found == [wanted] * size
    assert tokens_of(alone, sources) == wanted


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-block"])
async def test_weights_in_few_bits(name: str, tmp_path: Path) -> None:
    await check_few_bits(name, tmp_path, WORKER_CONFIG)


async def check_few_bits(name: str, tmp_path: Path, base: WorkerConfig) -> None:
    """Compares a worker over a quantized model with its wide twin, without and with adapters."""
    family, changes = FAMILIES["llama"]
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    save_random_model(tmp_path / "plain", family, SHAPE | changes | none)
    save_quantized(tmp_path / "plain", tmp_path / "base", tmp_path / "twin", FORMATS[name])
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32).eval()
    modules = []
    for index, made in enumerate(MADE):
        made.save(twin, tmp_path / f"a{index}")
        modules.append(AdapterModule(f"a{index}", str(tmp_path / f"a{index}")))
    wanted = [
        continued(one, PROMPTS[0], NUM_TOKENS)
        for one in (twin, *(made.merged(twin) for made in MADE))
    ]
    config = replace(base, lora_modules=tuple(modules))
    with serving(config, tmp_path / "base") as worker:
        known = adapters_of(worker)

        async def each(engine, stub):  # type: ignore[no-untyped-def]
            return [
                await generate_by(stub, known.get(name), PROMPTS[0], NUM_TOKENS)
                for name in ("", "a0", "a1")
            ]

        found, _ = await under_a_scheduler(worker, each, max_num_seqs=4)
    assert found == wanted


def test_a_step_whose_adapter_is_not_there_is_refused_without_a_trace(tmp_path: Path) -> None:
    family, changes = FAMILIES["llama"]
    model = save_random_model(tmp_path / "base", family, SHAPE | changes)
    runner = build(tmp_path / "base", [MADE[0].save(model, tmp_path / "a")], Group())
    store = runner.state.adapters
    assert store is not None
    step = StepInput(1, reset=True, new_sequences=(entering(0, 7),), slots=np.zeros(1, np.int64))
    step = replace(step, num_scheduled=np.array([20]))
    with pytest.raises(BadStep, match=r"new_sequences\[0\].adapter_preparation: 7 is none that is"):
        runner.execute(step)
    assert not len(runner.state.table.live_slots)
    (source,) = store.names.sources
    placed: list[AdapterOrder] = []
    orders = AdapterOrders((AdapterOrder(7, source),), ())
    store.take_orders(orders, placed.append)
    loaded = store.fetch(placed[0]).result()
    assert isinstance(loaded, LoadedAdapter)
    assert not runner.execute(step).error
    occupant = runner.state.table.occupants[0]
    assert occupant is not None
    assert occupant.adapter is loaded
    runner.execute(StepInput(2, freed_slots=np.zeros(1, np.int64)))
    gone = replace(source, path=str(tmp_path / "gone"), adapter_id="a@other")
    with pytest.raises(BadAdapter, match="gone is no folder"):
        store.fetch(AdapterOrder(8, gone)).result()
