"""A tokenizer that does not match the model is detected."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gateway.scheduler.convert import model_from_proto
from gateway.scheduler.readiness import Readiness, ReadinessWatch, mismatch


def test_ids_beyond_the_models_vocabulary_are_a_mismatch(tokenizer: Any, model_info: Any) -> None:
    assert mismatch(tokenizer, model_from_proto(model_info, None)) is None
    model_info.tokenizer_sha256 = ""
    model_info.vocab_size = tokenizer.vocab_size
    assert mismatch(tokenizer, model_from_proto(model_info, None)) is None
    model_info.vocab_size = tokenizer.vocab_size - 1
    problem = mismatch(tokenizer, model_from_proto(model_info, None))
    assert problem is not None and str(tokenizer.vocab_size - 1) in problem


class SlowStub:
    """Answers no call in time, and notes how long it was given."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    async def GetStatus(self, request: Any, timeout: float) -> Any:
        self.timeouts.append(timeout)
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, metadata, metadata, "late")


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_slow_scheduler_keeps_its_model_as_long_as_its_stream_is_open(
    tokenizer: Any, model_info: Any, is_open: bool
) -> None:
    link: Any = SimpleNamespace(is_handing_over=False, is_open=is_open)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        watch = ReadinessWatch(channel, link, tokenizer)
        stub: Any = SlowStub()
        watch._stub = stub
        watch.current = Readiness(True, "", model_from_proto(model_info, None))
        found = [await watch._poll() for _ in range(3)]
    assert not any(readiness.is_ready for readiness in found)
    assert [readiness.model is not None for readiness in found] == [is_open] * 3
    assert stub.timeouts == [2.0, 4.0, 8.0]
