"""Rows with adapters equal the models that contain them: alone, together, and whatever happens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagewire.v1 import types_pb2
from scheduler_svc.engine import Engine
from scheduler_svc.speculation.options import Method, SpeculationOptions
from tests.worker_svc.adapters.peft_folders import ALL_LINEAR, MadeAdapter, continued
from tests.worker_svc.adapters.served_adapters import adapters_of, generate_by
from tests.worker_svc.conftest import VOCAB_SIZE, WORKER_CONFIG, Worker, serving
from tests.worker_svc.random_models import Family, save_random_model
from tests.worker_svc.transformers_models.test_served import under_a_scheduler
from worker_svc.adapters.options import AdapterModule
from worker_svc.config import WorkerConfig
from worker_svc.models import compiled

NUM_ADAPTERS, NUM_TOKENS, NUM_SUNG = 20, 6, 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama with biases": (
        (LlamaConfig, LlamaForCausalLM),
        {"attention_bias": True, "mlp_bias": True},
    ),
    "qwen3": ((Qwen3Config, Qwen3ForCausalLM), {}),
    "gemma3": (
        (Gemma3TextConfig, Gemma3ForCausalLM),
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
# Of all kinds: every module, some, ranks and scales that differ from module to module.
KINDS = (
    MadeAdapter(),
    MadeAdapter(("q_proj", "v_proj"), rank=16, is_rank_stabilized=True),
    MadeAdapter(("k_proj", "o_proj", "up_proj"), rank=1, alpha=3),
    MadeAdapter(rank=4, ranks={"q_proj": 12, "1.mlp.down_proj": 2}, alphas={"o_proj": 1.0}),
    MadeAdapter(("gate_proj",), rank=32, alpha=64),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the tokens that the merged model makes of it."""

    adapter: str  # empty: the model alone
    prompt: list[int]
    wanted: list[int]


@dataclass(frozen=True, slots=True)
class Made:
    worker: Worker
    cases: list[Case]
    repeating: list[Case]  # of prompts that repeat themselves

    async def ask(self, stub: Any, case: Case) -> list[int]:
        adapter = adapters_of(self.worker).get(case.adapter)
        assert (adapter is None) is (not case.adapter)
        return await generate_by(stub, adapter, case.prompt, len(case.wanted))

    async def ask_all(self, stub: Any, cases: list[Case]) -> list[list[int]]:
        known: dict[str, types_pb2.Adapter] = adapters_of(self.worker)
        calls = (
            generate_by(stub, known.get(case.adapter), case.prompt, len(case.wanted))
            for case in cases
        )
        return list(await asyncio.gather(*calls))


def prompt_of(seed: int) -> list[int]:
    """A prompt of 3 to 60 tokens: in one block, at the edges of some, and longer than a chunk."""
    random = np.random.default_rng(seed)
    return random.integers(3, VOCAB_SIZE, int(random.integers(3, 60))).tolist()


def adapters_for(model: PreTrainedModel, folder: Path) -> dict[str, MadeAdapter]:
    made = {
        f"a{index}": replace(KINDS[index % len(KINDS)], seed=index) for index in range(NUM_ADAPTERS)
    }
    for name, one in made.items():
        one.save(model, folder / name)
    return made


@contextmanager
def serving_merged(name: str, folder: Path, base: WorkerConfig = WORKER_CONFIG) -> Iterator[Made]:
    """A family in a worker, with all adapters, and what the merged models make of the requests."""
    family, changes = FAMILIES[name]
    model = save_random_model(folder / "base", family, SHAPE | changes)
    adapters = adapters_for(model, folder)
    merged = {"": model} | {name: one.merged(model) for name, one in adapters.items()}
    songs = [[3 + index, 50, 60, 70] * 8 for index in range(8)]
    repeating = [
        Case(one, song, continued(merged[one], song, NUM_SUNG))
        for one, song in zip(["", *adapters], songs, strict=False)
    ]
    order = [*adapters, *[""] * 8, *list(adapters)[:4]]
    cases = [
        Case(one, prompt := prompt_of(seed), continued(merged[one], prompt, NUM_TOKENS))
        for seed, one in enumerate(order)
    ]
    config = replace(
        base,
        lora_modules=tuple(AdapterModule(name, str(folder / name)) for name in adapters),
        max_loras=16,
        max_lora_rank=32,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        num_kv_blocks=400,
    )
    with serving(config, folder / "base") as worker:
        yield Made(worker, cases, repeating)


@pytest.fixture(scope="module", params=["llama with biases by c", "qwen3 by torch", "gemma3 by c"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    name, by = request.param.split(" by ")
    with pytest.MonkeyPatch.context() as patch:
        if by == "torch":
            patch.setattr(compiled, "supports", lambda *_: False)
        with serving_merged(name, tmp_path_factory.mktemp("merged")) as one:
            backend = one.worker.describe().description.attention_backend
            assert backend.startswith(by)
            yield one


def wanted_of(cases: list[Case]) -> list[list[int]]:
    return [case.wanted for case in cases]


async def test_twenty_adapters_alone(made: Made) -> None:
    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        return [await made.ask(stub, case) for case in made.cases[:NUM_ADAPTERS]]

    found, _ = await under_a_scheduler(made.worker, each, max_num_seqs=32)
    assert found == wanted_of(made.cases[:NUM_ADAPTERS])
    alone = [case.wanted for case in made.cases if not case.adapter]
    assert not any(tokens in alone for tokens in found)


async def test_sixteen_adapters_and_rows_without_in_one_batch(made: Made) -> None:
    cases = [*made.cases[:16], *made.cases[NUM_ADAPTERS:], *made.cases[4:8]]

    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        return await made.ask_all(stub, cases)

    found, _ = await under_a_scheduler(made.worker, together, max_num_seqs=32)
    assert found == wanted_of(cases)
    assert len(cases) == 32
    assert len([case for case in cases if not case.adapter]) == 8


async def test_twenty_adapters_where_a_step_may_have_sixteen(made: Made) -> None:
    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        return await made.ask_all(stub, made.cases)

    found, _ = await under_a_scheduler(made.worker, together, max_num_seqs=32)
    assert found == wanted_of(made.cases)
    assert len(made.cases) == 32


async def test_after_preemptions_and_a_lost_stream(made: Made) -> None:
    async def disturbed(engine: Engine, stub: Any) -> list[list[int]]:
        answers = asyncio.ensure_future(made.ask_all(stub, made.cases))
        (group,) = engine.groups
        core = group.core
        assert core is not None
        while not core.internal_state.running.sequences:
            await asyncio.sleep(0.001)
        state = core.internal_state
        state.preempt(state.running.sequences[-1])
        state.renew_running()
        await asyncio.sleep(0.01)
        session = made.worker.server._session
        assert session._stream is not None
        session.end(session._stream, None)
        return await answers

    found, engine = await under_a_scheduler(made.worker, disturbed, max_num_seqs=32)
    assert found == wanted_of(made.cases)
    (group,) = engine.groups
    assert group.num_recoveries == 1


async def test_drafts_of_the_model_alone_change_no_token(made: Made) -> None:
    async def together(engine: Engine, stub: Any) -> list[list[int]]:
        return await made.ask_all(stub, made.repeating)

    # By a number of rows in place of measured times, which a busy machine has others of.
    lookup = SpeculationOptions(Method.NGRAM, prompt_lookup_min=1, disable_by_batch_size=64)
    found, engine = await under_a_scheduler(
        made.worker, together, max_num_seqs=32, speculative_config=lookup
    )
    assert found == wanted_of(made.repeating)
    (group,) = engine.groups
    assert group.core is not None
    assert group.core.counters.num_drafts > 0


async def test_a_prefix_is_shared_within_an_adapter_and_never_between(made: Made) -> None:
    prompt = list(range(3, 3 + 33))  # two blocks of 16, and a token
    known = adapters_of(made.worker)

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        (group,) = engine.groups
        assert group.core is not None
        hits, tokens = [], []
        for name in ("a0", "a1", "", "a0", "a1", ""):
            before = group.core.counters.prefix_hit_tokens
            tokens.append(await generate_by(stub, known.get(name), prompt, NUM_TOKENS))
            hits.append(group.core.counters.prefix_hit_tokens - before)
        assert tokens[:3] == tokens[3:]
        assert len({*map(tuple, tokens)}) == 3
        return [hits]

    found, _ = await under_a_scheduler(made.worker, each, max_num_seqs=32)
    assert found == [[0, 0, 0, 32, 32, 32]]


def test_every_linear_module_is_adapted() -> None:
    assert {one for kind in KINDS for one in kind.modules} == {*ALL_LINEAR}
