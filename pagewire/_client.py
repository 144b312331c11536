"""The blocking client: starts calls and waits for them."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from pagewire import _batch
from pagewire._channel import (
    DEFAULT_RESUME_TIMEOUT_S,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    Connection,
    ReadyWait,
    open_channel,
)
from pagewire._chat import ChatOptions, Messages
from pagewire._errors import PagewireError, translated
from pagewire._messages import answers, convert
from pagewire._resume import Deadline, ResumePatience, resumed
from pagewire._stream import Stream, StreamCall
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

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_StreamRequest = TypeVar("_StreamRequest", pb.GenerateStreamRequest, pb.ChatStreamRequest)
_StreamResponse = TypeVar("_StreamResponse", pb.GenerateStreamResponse, pb.ChatStreamResponse)


class Client:
    """A connection to a pagewire server; may be shared between threads.

    >>> import pagewire
    >>> client = pagewire.Client()  # doctest: +SKIP
    >>> print(client.chat("What is the capital of France?").text)  # doctest: +SKIP
    The capital of France is Paris.

    Sampling parameters are keywords, or one SamplingParams. `timeout_s` is the time limit of each
    call in seconds, unless the call has its own. A stream that breaks because the connection or the
    gateway is lost is resumed after its last token if that succeeds within `resume_timeout_s`
    seconds; 0 never resumes.
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
        self._channel = open_channel(self._connection)
        self._stub = InferenceServiceStub(self._channel)
        self._embedding_stub = EmbeddingServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Completion:
        """Returns the completion of a text or token ids. Raises PagewireError.

        >>> client.generate("Once upon a time", max_tokens=16, temperature=0)  # doctest: +SKIP
        """
        request = convert.to_generate(prompt, params, options)
        response = self._call(self._stub.Generate, request, options.get("timeout_s"))
        return answers.to_completion(response)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Stream:
        """Returns a stream of the completion of a text or token ids; it raises PagewireError."""
        request = convert.to_stream(prompt, params, options)
        return self._open(self._stub.GenerateStream, request, options.get("timeout_s"))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> Completion:
        """Returns the answer to a conversation. Raises PagewireError.

        The conversation is a string (one turn of the user), or turns as Message or {"role",
        "content"}. With `tools` the answer may contain calls of them: append its `message` to the
        conversation, then each result as a turn of role tool with the call's `tool_call_id`.

        >>> client.chat("What is the capital of France?").text  # doctest: +SKIP
        'The capital of France is Paris.'
        """
        request = convert.to_chat(messages, params, options)
        response = self._call(self._stub.Chat, request, options.get("timeout_s"))
        return answers.to_completion(response)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatCallOptions],
    ) -> Stream:
        """Returns a stream of the answer to a conversation. Reading it raises PagewireError.

        >>> for delta in client.stream_chat("Tell me a joke."):  # doctest: +SKIP
        ...     print(delta.text, end="", flush=True)
        """
        request = convert.to_stream_chat(messages, params, options)
        return self._open(self._stub.ChatStream, request, options.get("timeout_s"))

    def batch(
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

        >>> client.batch(["2 + 2 =", "3 + 3 ="], max_tokens=4)  # doctest: +SKIP
        """
        requests = convert.to_batch(prompts, params, options)
        start = partial(
            self._stub.Generate.future, **self._connection.terms(options.get("timeout_s"))
        )
        bar = Progress(len(requests), "batch", sys.stderr, enabled=progress)
        with translated(self._connection.target), bar:
            responses = _batch.run(start, requests, max_concurrency, bar.advance)
        return [answers.to_completion(response) for response in responses]

    def tokenize(
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
        response = self._call(self._stub.Tokenize, request, timeout_s)
        return tuple(response.token_ids)

    def embed(
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

        >>> client.embed(["a cat", "a dog"]).vectors  # doctest: +SKIP
        """
        request = convert.to_embed(inputs, pooling, normalize, model, request_id)
        response = self._call(self._embedding_stub.Embed, request, timeout_s)
        return answers.to_embeddings(response)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Returns the text of token ids. Raises PagewireError."""
        request = convert.to_detokenize(token_ids, model, skip_special_tokens)
        response = self._call(self._stub.Detokenize, request, timeout_s)
        return response.text

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Returns the served models; empty until a worker is ready. Raises PagewireError."""
        response = self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return answers.to_models(response)

    def wait_until_ready(self, timeout_s: float = 60.0) -> tuple[Model, ...]:
        """Waits at most `timeout_s` seconds until the server serves a model; returns its models.

        Raises DeadlineExceeded with the last reason.
        """
        wait = ReadyWait(self._connection.target, timeout_s)
        while True:
            attempt_s = wait.attempt_s()
            try:
                wait.note(self.models(timeout_s=attempt_s))
            except PagewireError as error:
                wait.sit_out(error)
            if wait.models:
                return wait.models
            time.sleep(wait.POLL_S)

    def close(self) -> None:
        """Cancels every call and closes the connection."""
        self._channel.close()

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        with translated(self._connection.target):
            return method(request, **self._connection.terms(timeout_s))

    def _open(
        self,
        method: "grpc.UnaryStreamMultiCallable[_StreamRequest, _StreamResponse]",
        request: _StreamRequest,
        timeout_s: float | None,
    ) -> Stream:
        connection, num_outputs = self._connection, request.options.n or 1
        deadline = Deadline(connection.timeout_s if timeout_s is None else timeout_s)

        def reopen(
            outputs: Sequence[pb.ResumedOutput], attempt: int, num_deaths: int
        ) -> StreamCall:
            again = resumed(request, outputs, attempt, num_deaths) if attempt else request
            return method(again, **connection.terms(deadline.remaining_s))

        return Stream(
            reopen,
            connection.target,
            ResumePatience(connection.resume_timeout_s),
            num_outputs,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
