"""Adapters that are unloaded, replaced or lost while requests have them or wait for them."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.v1 import scheduler_pb2, types_pb2
from scheduler_svc.engine import Engine
from tests.worker_svc.adapters.peft_folders import MadeAdapter, continued
from tests.worker_svc.adapters.served_adapters import generate_by
from tests.worker_svc.conftest import VOCAB_SIZE, WORKER_CONFIG, Worker, make_prompt, serving
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.transformers_models.test_served import under_a_scheduler

PROMPT, NUM_TOKENS = make_prompt(20), 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True, slots=True)
class Served:
    """A worker with one place for adapters and room for one in memory, and two folders."""

    worker: Worker
    folders: tuple[Path, Path]
    wanted: tuple[list[int], list[int], list[int]]  # by the first adapter, the second, the model


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model = save_random_model(tmp_path / "base", (LlamaConfig, LlamaForCausalLM), SHAPE)
    first, second = MadeAdapter(seed=1), MadeAdapter(seed=2)
    folders = first.save(model, tmp_path / "first"), second.save(model, tmp_path / "second")
    models = first.merged(model), second.merged(model), model
    one, other, alone = (continued(each, PROMPT, NUM_TOKENS) for each in models)
    config = replace(WORKER_CONFIG, max_loras=1, max_cpu_loras=1)
    with serving(config, tmp_path / "base") as worker:
        yield Served(worker, folders, (one, other, alone))


async def load(stub: Any, name: str, path: Path, *, replaces: bool = False) -> types_pb2.Adapter:
    request = scheduler_pb2.SchedulerServiceLoadAdapterRequest(
        name=name, path=str(path), replaces=replaces
    )
    answer = await stub.LoadAdapter(request)
    adapter: types_pb2.Adapter = answer.adapter
    return adapter


async def names_of(stub: Any) -> list[str]:
    status = await stub.GetStatus(scheduler_pb2.GetStatusRequest())
    return [adapter.name for adapter in status.adapters]


async def test_live_requests_keep_an_adapter_that_is_unloaded_or_replaced(served: Served) -> None:
    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        first = await load(stub, "a", served.folders[0])
        calls = [
            asyncio.create_task(generate_by(stub, first, PROMPT, NUM_TOKENS)) for _ in range(3)
        ]
        second = await load(stub, "a", served.folders[1], replaces=True)
        assert second.adapter_id != first.adapter_id
        calls.append(asyncio.create_task(generate_by(stub, second, PROMPT, NUM_TOKENS)))
        assert await names_of(stub) == ["a"]
        await stub.UnloadAdapter(scheduler_pb2.SchedulerServiceUnloadAdapterRequest(name="a"))
        assert await names_of(stub) == []
        return await asyncio.gather(*calls)

    found, _ = await under_a_scheduler(served.worker, work, max_num_seqs=4)
    one, other, _ = served.wanted
    assert found == [one, one, one, other]
    assert not served.worker.describe().description.adapters


async def test_a_folder_that_is_gone_ends_its_requests_alone(served: Served) -> None:
    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        first = await load(stub, "a", served.folders[0])
        second = await load(stub, "b", served.folders[1])  # memory has room for one
        shutil.rmtree(served.folders[0])
        calls = [generate_by(stub, one, PROMPT, NUM_TOKENS) for one in (first, second, None, first)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in (answers[0], answers[3]):
            assert isinstance(answer, grpc.aio.AioRpcError)
            assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert answer.details() == f"adapter: a: {served.folders[0]} is no folder"
        return [answers[1], answers[2]]  # type: ignore[list-item]

    found, _ = await under_a_scheduler(served.worker, work, max_num_seqs=4)
    assert found == [served.wanted[1], served.wanted[2]]


async def test_a_folder_with_other_content_is_no_other_text(served: Served) -> None:
    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        first = await load(stub, "a", served.folders[0])
        await load(stub, "b", served.folders[1])
        shutil.rmtree(served.folders[0])
        shutil.copytree(served.folders[1], served.folders[0])
        with pytest.raises(grpc.aio.AioRpcError, match="holds another adapter than when 'a' was"):
            await generate_by(stub, first, PROMPT, NUM_TOKENS)
        return []

    await under_a_scheduler(served.worker, work, max_num_seqs=4)


async def test_aborted_requests_leave_no_place_taken(served: Served) -> None:
    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        first = await load(stub, "a", served.folders[0])
        second = await load(stub, "b", served.folders[1])
        for one in (first, second, first):  # each waits for the place of the one before
            calls = [
                asyncio.create_task(generate_by(stub, one, PROMPT, NUM_TOKENS)) for _ in range(6)
            ]
            await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return [await generate_by(stub, one, PROMPT, NUM_TOKENS) for one in (second, first)]

    found, _ = await under_a_scheduler(served.worker, work, max_num_seqs=4)
    one, other, _ = served.wanted
    assert found == [other, one]


async def test_the_scheduler_refuses_in_the_words_of_the_worker(served: Served) -> None:
    async def work(engine: Engine, stub: Any) -> list[list[int]]:
        await load(stub, "a", served.folders[0])
        for name, path, code, problem in (
            ("a", served.folders[0], grpc.StatusCode.ALREADY_EXISTS, "'a' is loaded already"),
            ("b", served.folders[0] / "x", grpc.StatusCode.INVALID_ARGUMENT, "is no folder"),
            ("", served.folders[0], grpc.StatusCode.INVALID_ARGUMENT, "name: '' is empty"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=problem) as refused:
                await load(stub, name, path)
            assert refused.value.code() is code
        request = scheduler_pb2.SchedulerServiceUnloadAdapterRequest(name="b")
        with pytest.raises(grpc.aio.AioRpcError, match="no adapter is named 'b'"):
            await stub.UnloadAdapter(request)
        assert await names_of(stub) == ["a"]
        return []

    await under_a_scheduler(served.worker, work, max_num_seqs=4)
