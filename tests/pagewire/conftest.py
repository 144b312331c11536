"""A gateway with scripted answers, on a real port."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2_grpc
from grpc_status import rpc_status

from pagewire.v1 import (
    embedding_pb2,
    embedding_pb2_grpc,
    inference_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)
from pagewire.v1 import inference_pb2 as pb
from tests.pace import patience

CERTS = Path(__file__).parent / "certs"
ANSWER = ("The", " capital", " is", " Paris", ".")
MODEL = types_pb2.ModelInfo(
    model="tiny",
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    max_model_len=512,
    eos_token_ids=[2],
    dtype="float32",
)


class FakeGateway(
    inference_pb2_grpc.InferenceServiceServicer, embedding_pb2_grpc.EmbeddingServiceServicer
):
    """Answers ANSWER, cut at max_tokens and repeated past it with ignore_eos.

    Some prompts have other effects: "fail NAME" ends with that status, "hang" never answers,
    "endless" streams until cancelled, "broken" ends without a finish reason, "wait" takes 50 ms.
    """

    def __init__(self) -> None:
        self.target = ""
        self.requests: list[object] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.num_calls: Counter[str] = Counter()
        self.num_unavailable: Counter[str] = Counter()  # failures left, by method
        self.cancelled = threading.Event()
        self.num_live = 0
        self.max_live = 0
        self.models = [MODEL]
        self._lock = threading.Lock()

    def _enter(self, method: str, request: object, context: grpc.ServicerContext) -> None:
        with self._lock:
            self.num_calls[method] += 1
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            fails = self.num_unavailable[method] > 0
            self.num_unavailable[method] -= fails
        if fails:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    def _words(
        self, text: str, options: pb.GenerationOptions, context: grpc.ServicerContext
    ) -> Iterator[str]:
        context.add_callback(lambda: context.is_active() or self.cancelled.set())
        if text.startswith("fail "):
            context.abort(grpc.StatusCode[text.removeprefix("fail ")], "because the test wants it")
        if text == "overload":
            context.abort_with_status(_overload())
        if text == "hang":
            while context.is_active():
                time.sleep(0.01)
        if text == "endless":
            while context.is_active():
                yield "on "
                time.sleep(0.005)
        if text == "wait":
            time.sleep(0.05)
        sampling = options.sampling
        limit = sampling.max_tokens if sampling.HasField("max_tokens") else len(ANSWER)
        count = limit if sampling.ignore_eos else min(limit, len(ANSWER))
        yield from (ANSWER[index % len(ANSWER)] for index in range(count))

    def _deltas(self, text, options, context) -> Iterator[pb.OutputDelta]:
        words = list(self._words(text, options, context)) if text != "endless" else None
        if words is None:
            yield from (
                pb.OutputDelta(text=word, token_ids=[7])
                for word in self._words(text, options, context)
            )
            return
        for word in words[:-1]:
            yield pb.OutputDelta(text=word, token_ids=[len(word)])
        end = pb.OutputDelta(text=words[-1], token_ids=[len(words[-1])])
        if text != "broken":
            end.finish_reason = types_pb2.FINISH_REASON_STOP
            end.usage.CopyFrom(types_pb2.Usage(prompt_tokens=3, completion_tokens=len(words)))
        yield end

    def _output(self, text, options, context) -> pb.Output:
        with self._lock:
            self.num_live += 1
            self.max_live = max(self.max_live, self.num_live)
        try:
            words = list(self._words(text, options, context))
        finally:
            with self._lock:
                self.num_live -= 1
        return pb.Output(
            text=f"{text}:{''.join(words)}",
            token_ids=[len(word) for word in words],
            finish_reason=types_pb2.FINISH_REASON_STOP,
            usage=types_pb2.Usage(prompt_tokens=3, completion_tokens=len(words), cached_tokens=2),
        )

    def Generate(self, request, context):
        self._enter("Generate", request, context)
        output = self._output(request.prompt.text, request.options, context)
        return pb.GenerateResponse(request_id="made", model="tiny", output=output)

    def GenerateStream(self, request, context):
        self._enter("GenerateStream", request, context)
        for delta in self._deltas(request.prompt.text, request.options, context):
            yield pb.GenerateStreamResponse(request_id="made", model="tiny", delta=delta)

    def Chat(self, request, context):
        self._enter("Chat", request, context)
        output = self._output(request.messages[-1].content, request.options, context)
        return pb.ChatResponse(request_id="made", model="tiny", output=output)

    def ChatStream(self, request, context):
        self._enter("ChatStream", request, context)
        for delta in self._deltas(request.messages[-1].content, request.options, context):
            yield pb.ChatStreamResponse(request_id="made", model="tiny", delta=delta)

    def Embed(self, request, context):
        self._enter("Embed", request, context)
        return embedding_pb2.EmbedResponse(
            request_id=request.request_id or "made-up",
            model="tiny",
            embeddings=[
                embedding_pb2.Embedding(values=[i, 0.5]) for i in range(len(request.inputs))
            ],
            usage=types_pb2.Usage(prompt_tokens=3 * len(request.inputs)),
        )

    def Tokenize(self, request, context):
        self._enter("Tokenize", request, context)
        return pb.TokenizeResponse(token_ids=request.text.encode(), max_model_len=512)

    def Detokenize(self, request, context):
        self._enter("Detokenize", request, context)
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(self, request, context):
        self._enter("ListModels", request, context)
        defaults = types_pb2.SamplingParams(temperature=0.6, top_k=20)
        return pb.ListModelsResponse(models=self.models, sampling_defaults=defaults)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Reports a fixed status."""

    def __init__(self) -> None:
        self.target = ""
        self.before_status = lambda: None
        self.status = scheduler_pb2.GetStatusResponse(
            ready=True,
            model=MODEL,
            num_running=3,
            num_waiting=1,
            num_waiting_tokens=20,
            num_blocks=200,
            num_free_blocks=150,
            block_size=16,
            prefix_query_tokens=400,
            prefix_hit_tokens=100,
            num_preemptions=2,
            max_num_seqs=8,
            attention_backend="decode: triton, prefill: flash-attn 3",
            all_reduce="peer memory, nccl above 4096 KiB",
        )

    def Session(self, request_iterator, context):
        raise NotImplementedError

    def Generate(self, request, context):
        raise NotImplementedError

    def Abort(self, request, context):
        raise NotImplementedError

    def GetStatus(self, request, context):
        self.before_status()
        return self.status


def _overload() -> grpc.Status:
    detail = Packed()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000)))
    return rpc_status.to_status(Status(code=8, message="64 requests wait", details=[detail]))


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    server = grpc.server(ThreadPoolExecutor(40))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(0).wait(patience(5))


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    fake = FakeScheduler()
    server = grpc.server(ThreadPoolExecutor(4))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    fake.status.worker_address = fake.target  # its own health answers for the worker
    server.start()
    yield fake
    server.stop(0).wait(patience(5))


@pytest.fixture
def secure_gateway() -> Iterator[FakeGateway]:
    """As `gateway`, but with TLS, and only for clients with a certificate."""
    fake = FakeGateway()
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(fake, server)
    pair = ((CERTS / "server.key").read_bytes(), (CERTS / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials(
        [pair], root_certificates=(CERTS / "ca.pem").read_bytes(), require_client_auth=True
    )
    fake.target = f"localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    yield fake
    server.stop(0).wait(patience(5))
