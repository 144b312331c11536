"""A server for tests of programs that use the SDK: in this process, without a model.

>>> import pagewire.testing
>>> with pagewire.testing.FakeServer("The capital of France is Paris.") as server:
...     server.client().chat("What is the capital of France?").text
'The capital of France is Paris.'

It listens on a free port. A token is a character, its id the code point. Streams send one word per
message.
"""

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Self, cast

import grpc

from pagewire._aio import AsyncClient
from pagewire._chat import Message, ToolCall
from pagewire._client import Client
from pagewire._connection.status_details import retry_status
from pagewire._errors import BY_STATUS, PagewireError
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc, types_pb2

MODEL_NAME = "fake"
NUM_THREADS = 32
_STATUS_OF = {kind: status for status, kind in reversed(BY_STATUS.items())}

Answer = str | Message | Callable[[str], str | Message]


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A generation request as the server received it."""

    prompt: str  # of a conversation, the last turn
    turns: tuple[tuple[str, str], ...]  # (role, content); empty without a conversation
    options: pb.GenerationOptions
    chat: pb.ChatOptions = field(default_factory=pb.ChatOptions)  # tools and other options


@dataclass(frozen=True, slots=True)
class _Failure:
    error: PagewireError
    after_words: int


@dataclass(frozen=True, slots=True)
class _Reply:
    """An output before it is split into messages."""

    words: tuple[str, ...]
    reasoning: str | None
    tool_calls: Sequence[ToolCall]
    reason: types_pb2.FinishReason
    stop: str | None
    usage: types_pb2.Usage


class FakeServer:
    """Answers every prompt with a text, or with the result of a function of the prompt.

    A Message also returns its reasoning and tool calls. `max_tokens` and `stop` apply to the text,
    and all `n` outputs are equal; other options are recorded in `received` and have no effect.
    """

    def __init__(self, answer: Answer = "This is a test.") -> None:
        self.answer = answer
        self.received: list[ReceivedRequest] = []
        self._failures: deque[_Failure] = deque()
        self._lock = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS), options=[("grpc.so_reuseport", 0)]
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Service(self), self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def target(self) -> str:
        """The address of the server, for Client and AsyncClient."""
        return f"127.0.0.1:{self._port}"

    def client(self) -> Client:
        """A client of this server."""
        return Client(self.target)

    def async_client(self) -> AsyncClient:
        """An asyncio client of this server."""
        return AsyncClient(self.target)

    def fail_next(self, error: PagewireError, *, after_words: int = 0) -> None:
        """Makes the next generation fail, or its stream after some words. Failures queue up.

        An error with `retry_after_s` says that nothing ran, so the client comes back by itself; one
        whose message is "Socket closed" is a lost connection to it.
        """
        if type(error) not in _STATUS_OF:
            raise ValueError(f"error: {type(error).__name__} stands for no status")
        with self._lock:
            self._failures.append(_Failure(error, after_words))

    def start(self) -> None:
        """Starts listening, as `with` does."""
        self._server.start()

    def stop(self) -> None:
        """Cancels every call and closes the port."""
        self._server.stop(None).wait()

    def _take(self, received: ReceivedRequest) -> _Failure | None:
        with self._lock:
            self.received.append(received)
            return self._failures.popleft() if self._failures else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Service(inference_pb2_grpc.InferenceServiceServicer):
    """The RPCs of a FakeServer."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateResponse:
        received = ReceivedRequest(_text_of(request.prompt), (), request.options)
        request_id, (output, *more) = self._whole(received, context)
        return pb.GenerateResponse(
            request_id=request_id, model=MODEL_NAME, output=output, more_outputs=more
        )

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        received = ReceivedRequest(_text_of(request.prompt), (), request.options)
        for request_id, delta in self._pieces(received, context):
            yield pb.GenerateStreamResponse(request_id=request_id, model=MODEL_NAME, delta=delta)

    def Chat(self, request: pb.ChatRequest, context: grpc.ServicerContext) -> pb.ChatResponse:
        request_id, (output, *more) = self._whole(_received_from(request), context)
        return pb.ChatResponse(
            request_id=request_id, model=MODEL_NAME, output=output, more_outputs=more
        )

    def ChatStream(
        self, request: pb.ChatStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ChatStreamResponse]:
        for request_id, delta in self._pieces(_received_from(request), context):
            yield pb.ChatStreamResponse(request_id=request_id, model=MODEL_NAME, delta=delta)

    def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.ServicerContext
    ) -> pb.TokenizeResponse:
        text = request.text or "".join(m.content for m in request.conversation.messages)
        return pb.TokenizeResponse(token_ids=map(ord, text), max_model_len=1 << 20)

    def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.ServicerContext
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        model = types_pb2.ModelInfo(
            model=MODEL_NAME, architecture="none", vocab_size=0x110000, max_model_len=1 << 20
        )
        return pb.ListModelsResponse(models=[model])

    def _whole(
        self, received: ReceivedRequest, context: grpc.ServicerContext
    ) -> tuple[str, list[pb.Output]]:
        failure = self._server._take(received)
        if failure is not None:
            _fail(failure, context)
        reply = _reply(self._server.answer, received)
        outputs = [_output(reply, index) for index in range(received.options.n or 1)]
        return received.options.request_id or "fake-1", outputs

    def _pieces(
        self, received: ReceivedRequest, context: grpc.ServicerContext
    ) -> Iterator[tuple[str, pb.OutputDelta]]:
        failure, reply = self._server._take(received), _reply(self._server.answer, received)
        for index in range(received.options.n or 1):
            num_known = _num_known(received.options, index)
            for num_words, delta in enumerate(_deltas(reply, index)):
                if failure is not None and num_words == failure.after_words:
                    _fail(failure, context)
                num_skipped = int(min(num_known, len(delta.text)))
                num_known -= num_skipped
                if num_skipped:
                    delta.text, delta.reasoning = delta.text[num_skipped:], ""
                    del delta.token_ids[:num_skipped]
                if delta.text or (delta.finish_reason and num_known < math.inf):
                    yield received.options.request_id or "fake-1", delta
        if failure is not None:  # it had fewer words
            _fail(failure, context)


def _num_known(options: pb.GenerationOptions, index: int) -> float:
    """The characters of an output that a client has from a broken stream; all, of a whole one."""
    if not options.resume_outputs:
        return 0 if index else len(options.resume_token_ids)
    known = options.resume_outputs[index]
    return math.inf if known.is_finished else len(known.token_ids)


def _fail(failure: _Failure, context: grpc.ServicerContext) -> None:
    error = failure.error
    code = _STATUS_OF[type(error)]
    if error.retry_after_s is None:
        context.abort(code, str(error))
    refusal = retry_status(code, str(error), error.retry_after_s)
    context.abort_with_status(cast(grpc.Status, refusal))


def _text_of(prompt: pb.Prompt) -> str:
    return prompt.text or "".join(map(chr, prompt.token_ids.ids))


def _received_from(request: pb.ChatRequest | pb.ChatStreamRequest) -> ReceivedRequest:
    turns = tuple((turn.role, turn.content) for turn in request.messages)
    return ReceivedRequest(turns[-1][1] if turns else "", turns, request.options, request.chat)


def _reply(answer: Answer, received: ReceivedRequest) -> _Reply:
    if not isinstance(answer, str | Message):
        answer = answer(received.prompt)
    message = Message("assistant", answer) if isinstance(answer, str) else answer
    text, options = message.content, received.options
    reason, stop = types_pb2.FINISH_REASON_STOP, _first_stop(text, options.stop)
    if stop is not None:
        text = text[: text.index(stop)]
    most = options.sampling.max_tokens if options.sampling.HasField("max_tokens") else len(text)
    if len(text) > most:
        text, reason, stop = text[:most], types_pb2.FINISH_REASON_LENGTH, None
    usage = types_pb2.Usage(prompt_tokens=len(received.prompt), completion_tokens=len(text))
    words = tuple(re.findall(r"\s*\S+\s*$|\s*\S+|\s+", text))
    return _Reply(words, message.reasoning, message.tool_calls, reason, stop, usage)


def _first_stop(text: str, stops: Sequence[str]) -> str | None:
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def _output(reply: _Reply, index: int) -> pb.Output:
    text = "".join(reply.words)
    return pb.Output(
        text=text,
        token_ids=map(ord, text),
        finish_reason=reply.reason,
        stop_string=reply.stop,
        usage=reply.usage,
        index=index,
        reasoning=reply.reasoning,
        tool_calls=(pb.ToolCall(**asdict(call)) for call in reply.tool_calls),
    )


def _deltas(reply: _Reply, index: int) -> list[pb.OutputDelta]:
    """One word each; the first has the reasoning, the last has the calls and the end."""
    deltas = [
        pb.OutputDelta(text=word, token_ids=map(ord, word), index=index)
        for word in reply.words or ("",)
    ]
    deltas[0].reasoning = reply.reasoning or ""
    last = pb.OutputDelta(finish_reason=reply.reason, stop_string=reply.stop, usage=reply.usage)
    for number, call in enumerate(reply.tool_calls):
        last.tool_calls.add(index=number, **asdict(call))
    deltas[-1].MergeFrom(last)
    return deltas
