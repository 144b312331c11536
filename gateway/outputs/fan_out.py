"""Runs several requests of one call concurrently and ends them together.

A call is admitted or refused as a whole, with its first request. Where the others find the queue
full they wait and come back when they are told to: their places are reserved by then. Of a large
call only so many are submitted at once, so that other callers wait for these and not for all.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from gateway.errors.request_errors import ErrorKind, RequestError, unsupported
from gateway.outputs.beam_search import search
from gateway.pipeline.pipeline import Pipeline
from gateway.request.embeddings import PromptEmbedding
from gateway.request.generation import GenerationRequest, OutputDelta, WholeOutput, completion_of

Result = TypeVar("Result")
TASKS_PER_ROUND = 64
OUTPUTS_PER_ROUND = 4


async def complete_all(
    pipeline: Pipeline, requests: Sequence[GenerationRequest], names: Sequence[str] = ()
) -> list[WholeOutput]:
    """All outputs, in the order of the requests; the first failure cancels the others.

    A beam search has as many as it returns, the others have one. `names`, one per request, are
    what errors call its messages.
    """

    turns = _Turns(pipeline)

    async def complete(index: int, request: GenerationRequest) -> list[WholeOutput]:
        try:
            async with turns.one_for(request) as request:
                if request.beams is not None:
                    return await _whole(index, pipeline, request, turns, partial(search, pipeline))
                async with aclosing(_patiently(index, pipeline, request, turns)) as deltas:
                    return [completion_of([delta async for delta in deltas])]
        except RequestError as error:
            if not names:
                raise
            raise error.renamed("messages", names[index]) from error

    found = await _all([complete(index, request) for index, request in enumerate(requests)])
    return [output for outputs in found for output in outputs]


async def embed_all(
    pipeline: Pipeline, requests: Sequence[GenerationRequest], field: str, normalizes: bool
) -> list[PromptEmbedding]:
    """One vector per input, in order; the first failure cancels the others.

    Errors name the input by its index in `field`.
    """

    turns = _Turns(pipeline)

    async def embed(index: int, request: GenerationRequest) -> PromptEmbedding:
        try:
            async with turns.one_for(request) as request:
                embedding = await _whole(index, pipeline, request, turns, pipeline.embed)
        except RequestError as error:
            name = field if len(requests) == 1 else f"{field}[{index}]"
            raise error.renamed("prompt", name) from error
        return embedding.normalized() if normalizes else embedding

    return await _all([embed(index, request) for index, request in enumerate(requests)])


async def _all(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    tasks: list[asyncio.Task[Result]] = []
    try:
        await _begin(work, tasks)
        return await asyncio.gather(*tasks)
    finally:
        await _stop(tasks)


async def _begin(
    work: Sequence[Coroutine[Any, Any, Result]], tasks: list[asyncio.Task[Result]]
) -> None:
    """Adds a task for each, some in each round of the event loop: a call may be of thousands."""
    try:
        for one in work:
            tasks.append(asyncio.create_task(one))
            if not len(tasks) % TASKS_PER_ROUND:
                await asyncio.sleep(0)
    finally:
        for one in work[len(tasks) :]:
            one.close()


def generate_all(
    pipeline: Pipeline, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[OutputDelta, None]:
    """Deltas of all outputs as they arrive; `choice` is the index of the request. Use aclosing().

    Raises RequestError for a beam search, whose outputs are not known before its end.
    """
    for request in requests:
        if request.beams is not None:
            raise unsupported(request.beams.names.num_beams, "a beam search cannot be streamed")
    if len(requests) == 1:  # by far the most common; needs no task
        return pipeline.generate(requests[0])
    return _merged(pipeline, requests)


async def _merged(
    pipeline: Pipeline, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[OutputDelta, None]:
    merged: asyncio.Queue[OutputDelta | None] = asyncio.Queue()
    turns = _Turns(pipeline)
    work = [
        _pump(index, pipeline, request, turns, merged) for index, request in enumerate(requests)
    ]
    tasks: list[asyncio.Task[None]] = []
    try:
        await _begin(work, tasks)
        num_running = len(tasks)
        while num_running:
            item = await merged.get()
            if item is not None:
                yield item
                continue
            num_running -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises its error
    finally:
        await _stop(tasks)


async def _pump(
    index: int,
    pipeline: Pipeline,
    request: GenerationRequest,
    turns: "_Turns",
    merged: asyncio.Queue[OutputDelta | None],
) -> None:
    try:
        async with (
            turns.one_for(request) as request,
            aclosing(_patiently(index, pipeline, request, turns)) as deltas,
        ):
            async for delta in deltas:
                merged.put_nowait(delta._replace(choice=index))
    finally:
        merged.put_nowait(None)


async def _patiently(
    index: int, pipeline: Pipeline, request: GenerationRequest, turns: "_Turns"
) -> AsyncGenerator[OutputDelta, None]:
    """The deltas of one of the requests; a full queue refuses it before the first one."""
    while True:
        try:
            async with aclosing(pipeline.generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        except RequestError as error:
            request = await _come_back(index, pipeline, request, turns, error)


async def _whole(
    index: int,
    pipeline: Pipeline,
    request: GenerationRequest,
    turns: "_Turns",
    compute: Callable[[GenerationRequest], Awaitable[Result]],
) -> Result:
    """The result of one of the requests; a full queue refuses it before it is computed."""
    while True:
        try:
            return await compute(request)
        except RequestError as error:
            request = await _come_back(index, pipeline, request, turns, error)


async def _come_back(
    index: int,
    pipeline: Pipeline,
    request: GenerationRequest,
    turns: "_Turns",
    error: RequestError,
) -> GenerationRequest:
    """The request to submit once it has waited as long as the refusal advises.

    Raises the refusal when it is of the whole call.
    """
    if index == 0 or error.kind is not ErrorKind.OVERLOADED or error.retry_after_s is None:
        raise error
    began_s = pipeline.now()
    with pipeline.preparing():
        await asyncio.sleep(error.retry_after_s)
        await turns.round_with_few()
    return request.after(pipeline.now() - began_s)


class _Turns:
    """The turns of one call's outputs with the scheduler, in their order."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._free = asyncio.Semaphore(pipeline.readiness.most_of_call)
        self._starting = asyncio.Semaphore(OUTPUTS_PER_ROUND)

    async def round_with_few(self) -> None:
        """Waits for a round of the event loop in which few other outputs of the call begin."""
        async with self._starting:
            await asyncio.sleep(0)

    @asynccontextmanager
    async def one_for(self, request: GenerationRequest) -> AsyncIterator[GenerationRequest]:
        """Waits for a turn, which ends with the block; yields what is to be submitted then."""
        began_s, has_to_wait = self._pipeline.now(), self._free.locked()
        with self._pipeline.preparing():
            await self._free.acquire()
            await self.round_with_few()
        try:
            yield request.after(self._pipeline.now() - began_s) if has_to_wait else request
        finally:
            self._free.release()


async def _stop(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
