"""kill -9 of the worker while streams run: every stream ends as if nothing had happened."""

import threading
import time
from dataclasses import dataclass, field

import grpc
import pytest

from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.conftest import Product

NUM_STREAMS = 12
NUM_TOKENS = 48


@dataclass(slots=True)
class History:
    """What one client saw."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[int] = field(default_factory=list)
    usage: types_pb2.Usage | None = None


def prompt(index: int) -> list[int]:
    return [(index * 7919 + i * 104729) % 40000 + 1000 for i in range(20 + 9 * index)]


def sampling(index: int) -> types_pb2.SamplingParams:
    temperature = 0.0 if index % 2 else 1.0
    return types_pb2.SamplingParams(
        temperature=temperature, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def follow(product: Product, index: int, history: History) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{product.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt(index))),
            options=inference_pb2.GenerationOptions(sampling=sampling(index)),
        )
        for message in stub.GenerateStream(request, timeout=180):
            history.token_ids += message.delta.token_ids
            history.text += message.delta.text
            if message.delta.finish_reason:
                history.ends.append(message.delta.finish_reason)
                history.usage = message.delta.usage


def run_streams(product: Product, kill_after_tokens: int | None) -> list[History]:
    histories = [History() for _ in range(NUM_STREAMS)]
    threads = [
        threading.Thread(target=follow, args=(product, index, history))
        for index, history in enumerate(histories)
    ]
    for thread in threads:
        thread.start()
    if kill_after_tokens is not None:
        deadline = time.monotonic() + 120
        while sum(len(history.token_ids) for history in histories) < kill_after_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker = product.processes["worker_svc"]
        worker.kill()
        worker.wait()
        product.start_worker()
    for thread in threads:
        thread.join(180)
    return histories


@pytest.mark.slow
def test_streams_survive_two_kills_of_the_worker_with_equal_output(product: Product) -> None:
    calm = run_streams(product, kill_after_tokens=None)
    early = run_streams(product, kill_after_tokens=NUM_STREAMS)
    late = run_streams(product, kill_after_tokens=NUM_STREAMS * NUM_TOKENS // 2)
    for disturbed in (early, late):
        for before, after in zip(calm, disturbed, strict=True):
            assert after.ends == [types_pb2.FINISH_REASON_LENGTH]
            assert after.token_ids == before.token_ids
            assert after.text == before.text
            assert after.usage is not None
            assert after.usage.completion_tokens == NUM_TOKENS
    status = product.status()
    assert "num_running" not in status
    assert status["num_free_blocks"] == status["num_blocks"]
    product.wait_until_ready()
