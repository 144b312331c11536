"""The asyncio client, with the methods of the blocking one."""

import asyncio
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc.aio

from pagewire import _batch
from pagewire._channel import (
    DEFAULT_RESUME_TIMEOUT_S,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    Connection,
    ReadyWait,
    open_aio_channel,
)
from pagewire._chat import ChatOptions, Messages
from pagewire._errors import PagewireError, translated
from pagewire._messages import answers, convert
from pagewire._resume import Deadline, ResumePatience, resumed
from pagewire._stream import AioCall, AsyncStream
from pagewire._terminal import Progress
from pagewire._types import (
    TLS,
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
from pagewire.v1.embedding_pb2_grpc import EmbeddingServiceStub
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:  # names that only the typing stubs define
    from pagewire.v1.embedding_pb2_grpc import EmbeddingServiceAsyncStub
    from pagewire.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_StreamRequest = TypeVar("_StreamRequest", pb.GenerateStreamRequest, pb.ChatStreamRequest)
_StreamResponse = TypeVar("_StreamResponse", pb.GenerateStreamResponse, pb.ChatStreamResponse)


class AsyncClient:
    """A connection to a pagewire server, for one event loop. Methods are those of Client, awaited.

    >>> async with pagewire.AsyncClient() as client:  # doctest: +SKIP
    ...     async for delta in client.stream_chat("Tell me a joke."):
    ...         print(delta.text, end="", flush=True)
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: TLS | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_insecure_key: bool = False,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
    ) -> None:
        self._connection = Connection(
            target, api_key, tls, timeout_s, allow_insecure_key, resume_timeout_s
        )
        self._opened: grpc.aio.Channel | None = None

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        # An asyncio channel belongs to the loop that opens it, hence not in __init__.
        self._opened = open_aio_channel(self._connection)
        return self._opened

    @cached_property
    def _stub(self) -> "InferenceServiceAsyncStub":
        return InferenceServiceStub(self._channel)

    @cached_property
    def _embedding_stub(self) -> "EmbeddingServiceAsyncStub":
        return EmbeddingServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Returns the completion of a text or token ids. Raises PagewireError."""
        request = convert.to_generate(prompt, params, options)
        response = await self._call(self._stub.Generate, request, options.get("timeout_s"))
        return answers.to_completion(response)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStream:
        """Returns a stream of the completion of a text or token ids; it raises PagewireError."""
        request = convert.to_stream(prompt, params, options)
        return self._open(self._stub.GenerateStream, request, options.get("timeout_s"))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> Completion:
        """Returns the answer to a conversation. Raises PagewireError.

        The conversation is a string (one turn of the user), or turns as Message or {"role",
        "content"}.
        """
        request = convert.to_chat(messages, params, options)
        response = await self._call(self._stub.Chat, request, options.get("timeout_s"))
        return answers.to_completion(response)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> AsyncStream:
        """Returns a stream of the answer to a conversation. Reading it raises PagewireError."""
        request = convert.to_stream_chat(messages, params, options)
        return self._open(self._stub.ChatStream, request, options.get("timeout_s"))

    async def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        max_concurrency: int = _batch.DEFAULT_MAX_CONCURRENCY,
        progress: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Returns the completions of many prompts, in their order; `max_concurrency` run at a time.

        The first failure cancels the rest and is raised. On a terminal, stderr shows a progress
        bar; `progress` forces it on or off.
        """
        requests = convert.to_batch(prompts, params, options)
        call = partial(self._stub.Generate, **self._connection.terms(options.get("timeout_s")))
        bar = Progress(len(requests), "batch", sys.stderr, enabled=progress)
        with translated(self._connection.target), bar:
            responses = await _batch.run_aio(call, requests, max_concurrency, bar.advance)
        return [answers.to_completion(response) for response in responses]

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
        response = await self._call(self._stub.Tokenize, request, timeout_s)
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
        """
        request = convert.to_embed(inputs, pooling, normalize, model, request_id)
        response = await self._call(self._embedding_stub.Embed, request, timeout_s)
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
        response = await self._call(self._stub.Detokenize, request, timeout_s)
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Returns the served models; empty until a worker is ready. Raises PagewireError."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
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
            await asyncio.sleep(wait.POLL_S)

    async def close(self) -> None:
        """Cancels every call and closes the connection."""
        if self._opened is not None:
            await self._opened.close()

    async def _call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        with translated(self._connection.target):
            return await method(request, **self._connection.terms(timeout_s))

    def _open(
        self,
        method: "grpc.aio.UnaryStreamMultiCallable[_StreamRequest, _StreamResponse]",
        request: _StreamRequest,
        timeout_s: float | None,
    ) -> AsyncStream:
        connection, num_outputs = self._connection, request.options.n or 1
        deadline = Deadline(connection.timeout_s if timeout_s is None else timeout_s)

        def reopen(outputs: Sequence[pb.ResumedOutput], attempt: int, num_deaths: int) -> AioCall:
            again = resumed(request, outputs, attempt, num_deaths) if attempt else request
            return method(again, **connection.terms(deadline.remaining_s))

        return AsyncStream(
            reopen,
            connection.target,
            ResumePatience(connection.resume_timeout_s),
            num_outputs,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
