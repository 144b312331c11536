"""Adapters of a worker under a scheduler, by requests that name them."""

from typing import Any

from pagewire.v1 import types_pb2, worker_pb2
from tests.worker_svc.conftest import Worker
from tests.worker_svc.transformers_models.test_served import generate


def adapters_of(worker: Worker) -> dict[str, types_pb2.Adapter]:
    """The adapters that a worker was told to serve, by name."""
    return {one.name: one for one in worker.describe().description.adapters}


def load_adapter(worker: Worker, name: str, path: object) -> types_pb2.Adapter:
    request = worker_pb2.LoadAdapterRequest(name=name, path=str(path))
    answer = worker.unary("LoadAdapter", request, worker_pb2.LoadAdapterResponse)
    assert isinstance(answer, worker_pb2.LoadAdapterResponse)
    return answer.adapter


async def generate_by(
    stub: Any, adapter: types_pb2.Adapter | None, prompt: list[int], num_tokens: int
) -> list[int]:
    """Greedy tokens with an adapter, or by the model alone."""
    fields = {} if adapter is None else {"adapter": adapter}
    return await generate(stub, prompt, num_tokens, **fields)
