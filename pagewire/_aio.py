"""The asyncio client: starts calls and awaits them.

`_client.py` is made of this file by tests/pagewire/test_sync_client.py.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc.aio

from pagewire._attempts import batch as batches
from pagewire._attempts.batch import BatchResult
from pagewire._attempts.plan import CallPlanner, StreamCallPlan, WholeCall
from pagewire._channel import DEFAULT_RESUME_TIMEOUT_S, ReadyWait
from pagewire._chat import ChatOptions, Messages
from pagewire._connection.environment import to_connection
from pagewire._connection.stubs import AioStubs
from pagewire._errors import PagewireError, translated
from pagewire._messages import answers, convert
from pagewire._stream import AsyncStream, AsyncStreamCall
from pagewire._terminal import Progress
from pagewire._types import (
    TLS,
    BatchParams,
    CallOptions,
    ChatCallOptions,
    Completion,
    Embeddings,
    Model,
    Pooling,
    Prompt,
    SamplingParams,
)
from pagewire.v1 import inference_pb2 as pb

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncClient:
    """A connection to a pagewire server, for one event loop.

    >>> async with pagewire.AsyncClient() as client:  # doctest: +SKIP
    ...     answer = await client.chat("What is the capital of France?")
    ...     print(answer.text)
    The capital of France is Paris.

    Sampling parameters are keywords, or one SamplingParams. `timeout_s` is the time limit of each
    call in seconds, unless the call has its own. A stream that breaks because the connection or the
    gateway is lost is resumed after its last token if that succeeds within `resume_timeout_s`
    seconds; 0 never resumes. What never ran, or runs once by its key, is sent again up to
    `max_retries` times. `metadata` travels with every call. Settings that are not given come from
    the environment: PAGEWIRE_TARGET, PAGEWIRE_API_KEY, PAGEWIRE_CA_CERT, PAGEWIRE_TIMEOUT_S and
    PAGEWIRE_MAX_RETRIES.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        api_key: str | None = None,
        tls: TLS | None = None,
        timeout_s: float | None = None,
        allow_insecure_key: bool = False,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
        max_retries: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = to_connection(
            target,
            api_key,
            tls,
            timeout_s,
            allow_insecure_key,
            resume_timeout_s,
            max_retries,
            metadata,
        )
        self._planner = CallPlanner(self._connection)
        self._stubs = AioStubs(self._connection)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Returns the completion of a text or token ids. Raises PagewireError.

        >>> answer = await client.generate("Once upon a time", max_tokens=16)  # doctest: +SKIP
        """
        request = convert.to_generate(prompt, params, options)
        call = self._planner.whole(request, params, options)
        return await batches.aio_answer(self._stubs.inference.Generate, call)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStream:
        """Returns a stream of the completion of a text or token ids; it raises PagewireError."""
        request = convert.to_stream(prompt, params, options)
        plan = self._planner.stream(request, params, options)
        return self._open(self._stubs.inference.GenerateStream, plan)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> Completion:
        """Returns the answer to a conversation. Raises PagewireError.

        The conversation is a string (one turn of the user), or turns as Message or {"role",
        "content"}. With `tools` the answer may contain calls of them: append its `message` to the
        conversation, then each result as a turn of role tool with the call's `tool_call_id`.

        >>> answer = await client.chat("What is the capital of France?")  # doctest: +SKIP
        >>> answer.text  # doctest: +SKIP
        'The capital of France is Paris.'
        """
        request = convert.to_chat(messages, params, options)
        call = self._planner.whole(request, params, options)
        return await batches.aio_answer(self._stubs.inference.Chat, call)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> AsyncStream:
        """Returns a stream of the answer to a conversation. Reading it raises PagewireError.

        >>> async for delta in client.stream_chat("Tell me a joke."):  # doctest: +SKIP
        ...     print(delta.text, end="", flush=True)
        """
        request = convert.to_stream_chat(messages, params, options)
        plan = self._planner.stream(request, params, options)
        return self._open(self._stubs.inference.ChatStream, plan)

    @overload
    async def batch(
        self,
        prompts: Sequence[Prompt],
        params: BatchParams = None,
        *,
        max_concurrency: int = ...,
        progress: bool | None = ...,
        return_errors: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> list[Completion]: ...

    @overload
    async def batch(
        self,
        prompts: Sequence[Prompt],
        params: BatchParams = None,
        *,
        max_concurrency: int = ...,
        progress: bool | None = ...,
        return_errors: bool,
        **options: Unpack[CallOptions],
    ) -> list[BatchResult]: ...

    async def batch(
        self,
        prompts: Sequence[Prompt],
        params: BatchParams = None,
        *,
        max_concurrency: int = batches.DEFAULT_MAX_CONCURRENCY,
        progress: bool | None = None,
        return_errors: bool = False,
        **options: Unpack[CallOptions],
    ) -> Any:
        """Returns the completions of many prompts, in their order; `max_concurrency` run at a time.

        `params` are those of all prompts, or a list with those of each.
        The first failure cancels the rest and is raised; with `return_errors` it takes the place of
        its completion, and the rest goes on. On a terminal, stderr shows a progress bar; `progress`
        forces it on or off.

        >>> answers = await client.batch(["2 + 2 =", "3 + 3 ="])  # doctest: +SKIP
        """
        requests = convert.to_batch(prompts, params, options)
        calls = [partial(self._planner.whole, request, own, options) for request, own in requests]
        method = self._stubs.inference.Generate
        return await self._run(method, calls, max_concurrency, progress, return_errors)

    @overload
    async def batch_chat(
        self,
        conversations: Sequence[Messages],
        params: BatchParams = None,
        *,
        max_concurrency: int = ...,
        progress: bool | None = ...,
        return_errors: Literal[False] = False,
        **options: Unpack[ChatCallOptions],
    ) -> list[Completion]: ...

    @overload
    async def batch_chat(
        self,
        conversations: Sequence[Messages],
        params: BatchParams = None,
        *,
        max_concurrency: int = ...,
        progress: bool | None = ...,
        return_errors: bool,
        **options: Unpack[ChatCallOptions],
    ) -> list[BatchResult]: ...

    async def batch_chat(
        self,
        conversations: Sequence[Messages],
        params: BatchParams = None,
        *,
        max_concurrency: int = batches.DEFAULT_MAX_CONCURRENCY,
        progress: bool | None = None,
        return_errors: bool = False,
        **options: Unpack[ChatCallOptions],
    ) -> Any:
        """Returns the answers to many conversations, in their order; otherwise like batch."""
        requests = convert.to_batch_chat(conversations, params, options)
        calls = [partial(self._planner.whole, request, own, options) for request, own in requests]
        method = self._stubs.inference.Chat
        return await self._run(method, calls, max_concurrency, progress, return_errors)

    async def tokenize(
        self,
        text: Messages,
        *,
        add_special_tokens: bool | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Returns the token ids of a text, or of a conversation by the chat template.

        Raises PagewireError.
        """
        request = convert.to_tokenize(text, model, add_special_tokens, options)
        response = await self._call(self._stubs.inference.Tokenize, request, timeout_s)
        return tuple(response.token_ids)

    async def embed(
        self,
        inputs: str | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Returns one vector per text or token ids: pooled hidden states of the served model.

        `pooling` selects the last token's hidden state or the mean over all tokens; `normalize`
        scales each vector to length 1. Raises PagewireError.

        >>> embeddings = await client.embed(["a cat", "a dog"])  # doctest: +SKIP
        """
        request = convert.to_embed(inputs, pooling, normalize, model, request_id)
        response = await self._call(self._stubs.embedding.Embed, request, timeout_s)
        return answers.to_embeddings(response)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Returns the text of token ids. Raises PagewireError."""
        request = convert.to_detokenize(token_ids, model, skip_special_tokens)
        response = await self._call(self._stubs.inference.Detokenize, request, timeout_s)
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Returns the served models; empty until a worker is ready. Raises PagewireError."""
        request = pb.ListModelsRequest()
        response = await self._call(self._stubs.inference.ListModels, request, timeout_s)
        return answers.to_models(response)

    async def wait_until_ready(self, timeout_s: float = 60.0) -> tuple[Model, ...]:
        """Waits at most `timeout_s` seconds until the server serves a model; returns its models.

        Raises DeadlineExceeded with the last reason.
        """
        wait = ReadyWait(self._connection.target, timeout_s)
        while True:
            attempt_s = wait.attempt_s()
            try:
                wait.note(await self.models(timeout_s=attempt_s))
            except PagewireError as error:
                wait.sit_out(error)
            if wait.models:
                return wait.models
            await wait.aio_pause()

    async def close(self) -> None:
        """Cancels every call and closes the connection."""
        await self._stubs.close()

    async def _call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        with translated(self._connection.target):
            response = await method(request, **self._connection.terms(timeout_s))
        self._planner.note_answer()
        return response

    async def _run(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Any, Any]",
        calls: "Sequence[Callable[[], WholeCall[Any]]]",
        max_concurrency: int,
        progress: bool | None,
        keeps_errors: bool,
    ) -> list[BatchResult]:
        with Progress(len(calls), "batch", sys.stderr, enabled=progress) as bar:
            return await batches.aio_run(method, calls, max_concurrency, bar.advance, keeps_errors)

    def _open(
        self,
        method: "grpc.aio.UnaryStreamMultiCallable[Any, Any]",
        plan: StreamCallPlan[Any],
    ) -> AsyncStream:
        def reopen(
            outputs: Sequence[pb.ResumedOutput], attempt: int, num_deaths: int
        ) -> AsyncStreamCall:
            return method(plan.request(outputs, attempt, num_deaths), **plan.terms)

        return AsyncStream(reopen, plan)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
