"""The running product under load: mixed steps, prefix cache, cancellation."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagewire.v1 import debug_pb2, debug_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.conftest import Product
from tests.pace import patience

GREEDY = types_pb2.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def product(tiny_product: Product) -> Product:
    return tiny_product


def generate(
    token_ids: list[int], sampling: types_pb2.SamplingParams
) -> inference_pb2.GenerateStreamRequest:
    return inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=token_ids)),
        options=inference_pb2.GenerationOptions(sampling=sampling),
    )


def stream(
    stub: inference_pb2_grpc.InferenceServiceStub,
    token_ids: list[int],
    sampling: types_pb2.SamplingParams = GREEDY,
) -> tuple[list[int], types_pb2.Usage]:
    output: list[int] = []
    usage = types_pb2.Usage()
    for message in stub.GenerateStream(generate(token_ids, sampling), timeout=patience(120)):
        output += message.delta.token_ids
        usage = message.delta.usage
    return output, usage


def once(product: Product, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Polls the status until a condition holds; returns it.

    Asked by grpcurl: granted steps that the worker has begun count until they are cut, which takes
    less time than its start.
    """
    deadline_s = time.monotonic() + patience(10.0)
    question = "pagewire.v1.SchedulerService/GetStatus"
    while not holds(status := json.loads(product.grpcurl(product.scheduler_port, question))):
        assert time.monotonic() < deadline_s, status
    return dict(status)


def prompt(length: int, salt: int) -> list[int]:
    return [(salt * 7919 + i * 104729) % 40000 + 1000 for i in range(length)]


def test_sixteen_streams_share_steps_that_hold_prefill_and_decodes(product: Product) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{product.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        outputs: dict[int, list[int]] = {}

        def run(index: int) -> None:
            outputs[index] = stream(stub, prompt(40 + index, index))[0]

        # Long streams decode while the sixteen arrive, however fast the machine is.
        long = types_pb2.SamplingParams(temperature=0, max_tokens=1200, ignore_eos=True)
        calls = [stub.GenerateStream(generate(prompt(30, 100 + i), long)) for i in range(8)]
        for call in calls:
            next(call)
        threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(120))
        for call in calls:
            call.cancel()
        alone = [stream(stub, prompt(40 + index, index))[0] for index in (0, 15)]
    with grpc.insecure_channel(f"127.0.0.1:{product.scheduler_port}") as channel:
        debug = debug_pb2_grpc.DebugServiceStub(channel)
        steps = debug.ListSteps(debug_pb2.ListStepsRequest(limit=1000)).steps
    assert [len(outputs[i]) for i in range(16)] == [32] * 16
    assert alone == [outputs[0], outputs[15]]
    assert any(s.num_prefill_rows and s.num_decode_rows for s in steps)
    assert max(s.num_decode_rows for s in steps) >= 8


def test_the_same_500_token_prefix_is_computed_once(product: Product) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{product.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first, cold = stream(stub, prompt(500, 99))
        second, warm = stream(stub, prompt(500, 99))
        exact, whole_blocks = stream(stub, prompt(496, 99))
    assert first == second
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 496  # 31 full blocks of 16; at least one token is computed
    assert whole_blocks.cached_tokens == 480
    assert len(exact) == 32


def test_a_closed_stream_frees_its_blocks_within_two_steps(product: Product) -> None:
    before = product.status()
    with grpc.insecure_channel(f"127.0.0.1:{product.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        endless = types_pb2.SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        request = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt(100, 5))),
            options=inference_pb2.GenerationOptions(sampling=endless),
        )
        call = stub.GenerateStream(request)
        next(call)
        during = product.status()
        call.cancel()
        ended = once(product, lambda status: "num_running" not in status)
    assert during["num_running"] == 1
    assert during["num_free_blocks"] < before["num_free_blocks"]
    free = once(product, lambda status: status["num_free_blocks"] == before["num_free_blocks"])
    num_steps = int(free["num_steps"])
    assert num_steps <= int(ended["num_steps"]) + 2
    time.sleep(0.3)
    assert int(product.status()["num_steps"]) == num_steps  # no step is computed any more


def test_a_stop_string_ends_the_text_before_it(product: Product) -> None:
    def answer(**options: object) -> dict[str, str]:
        data = {
            "messages": [{"role": "user", "content": "Hello"}],
            "options": {"sampling": {"temperature": 0, "max_tokens": 24}, **options},
        }
        told = product.grpcurl(product.grpc_port, "pagewire.v1.InferenceService/Chat", data=data)
        output: dict[str, str] = json.loads(told)["output"]
        return output

    whole = answer()["text"]
    stop = whole[len(whole) // 2 :][:4]
    stopped = answer(stop=[stop])
    assert stopped["text"] == whole[: whole.index(stop)]
    assert stopped["stop_string"] == stop
