"""The link to the worker when two events coincide."""

import asyncio
from typing import Any

import pytest

from pagewire.v1 import worker_pb2
from scheduler_svc.worker.link import Attached, WorkerLink
from scheduler_svc.worker.watch import silence_patience
from wire.sealed import SealCheck


class Stream:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def read(self) -> Any:
        return await self.answer


def link_to(stream: Stream) -> WorkerLink:
    attached = Attached(worker_pb2.WorkerDescription(), epoch=1)
    return WorkerLink(stream, attached, silence_patience(3.0), SealCheck())  # type: ignore[arg-type]


@pytest.mark.parametrize("num_turns", range(5))
async def test_who_is_cancelled_stays_cancelled_though_the_answer_comes_now(num_turns: int) -> None:
    stream = Stream()
    receiving = asyncio.create_task(link_to(stream).receive())
    await asyncio.sleep(0.01)
    output = worker_pb2.ModelRunnerOutput(step_id=7)
    stream.answer.set_result(worker_pb2.AttachResponse(output=output).SerializeToString())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if receiving.cancel():
        with pytest.raises(asyncio.CancelledError):
            await receiving
    else:
        assert receiving.result() == output
