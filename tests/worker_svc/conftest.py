"""Fixtures: a tiny model, a worker that serves it on a free port, a minimal scheduler client."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import grpc
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.v1 import worker_pb2
from tests.kernels.interpreted import quicken
from tests.pace import patience
from tests.worker_svc.session_fakes import FakeLifecycle, FakeRunner, SlowRunner
from tests.worker_svc.spelling import VOCAB_SIZE
from wire.columns import pack, unpack
from worker_svc.config import WorkerConfig
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.serving.server import WorkerServer
from worker_svc.serving.session import Session

quicken()

TIMEOUT_S = patience(30)
WORKER_CONFIG = WorkerConfig(
    port=0,
    dtype="float32",
    device="cpu",
    num_kv_blocks=64,
    max_num_seqs=4,
    max_num_batched_tokens=96,
    max_model_len=192,
)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with varied greedy outputs, as a Hugging Face folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Greedy = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def greedy(llama_folder: Path) -> Greedy:
    """Greedy continuation of a prompt by transformers, token by token."""
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(prompt: list[int], num_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            logits = model(torch.tensor([token_ids])).logits[0, -1]
            token_ids.append(int(logits.argmax()))
        return token_ids[len(prompt) :]

    return run


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def make_sequence(
    slot: int, token_ids: list[int], block_ids: list[int], /, **fields: object
) -> worker_pb2.NewSequence:
    """A greedy sequence; `fields` override the defaults."""
    sampling = fields.pop("sampling", worker_pb2.RowSampling(top_p=1))
    defaults: dict[str, object] = {
        "slot": slot,
        "request_id": f"request-{slot}",
        "token_ids": pack(token_ids),
        "num_prompt_tokens": len(token_ids),
        "block_ids": pack(block_ids),
        "sampling": sampling,
    }
    return worker_pb2.NewSequence(**(defaults | fields))


class Attachment:
    """The scheduler's side of a step stream."""

    def __init__(self, channel: grpc.Channel, epoch: int, **hello_fields: object) -> None:
        self._outbox: SimpleQueue[worker_pb2.AttachRequest | bytes | None] = SimpleQueue()
        call = channel.stream_stream(
            "/pagewire.v1.WorkerService/Attach",
            request_serializer=lambda frame: (
                frame if isinstance(frame, bytes) else frame.SerializeToString()
            ),
            response_deserializer=worker_pb2.AttachResponse.FromString,
        )
        self.call = call(iter(self._outbox.get, None), timeout=TIMEOUT_S)
        self._step_ids = count(1)
        hello = worker_pb2.Hello(protocol_version=2, epoch=epoch, first_step_id=1, **hello_fields)
        self.send_raw(worker_pb2.AttachRequest(hello=hello))
        self.last_step_id = 0

    def receive_description(self) -> worker_pb2.WorkerDescription:
        return next(self.call).description

    def send_raw(self, frame: worker_pb2.AttachRequest | bytes) -> None:
        self._outbox.put(frame)

    def send(self, **fields: object) -> None:
        """Sends a step with lists as columns; fills in step ids and the reset of the first step."""
        step_id = next(self._step_ids)
        defaults: dict[str, object] = {"step_id": step_id, "reset": step_id == 1}
        columns = {
            name: pack(value)
            for name, value in fields.items()
            if isinstance(value, list) and name != "new_sequences"
        }
        step = worker_pb2.SchedulerOutput(**(defaults | fields | columns))
        self.send_raw(worker_pb2.AttachRequest(step=step))

    def receive(self) -> worker_pb2.ModelRunnerOutput:
        return next(self.call).output

    def step(self, **fields: object) -> list[int]:
        """Sends a step, waits for its output and returns its tokens."""
        self.send(**fields)
        output = self.receive()
        assert output.error == ""
        assert output.row_status == b""
        return unpack(output.token_ids).tolist()

    def close(self) -> None:
        """Half-closes the stream and waits until the worker has ended it."""
        self._outbox.put(None)
        assert list(self.call) == []

    def cancel(self) -> None:
        self.call.cancel()
        self._outbox.put(None)

    def status(self) -> grpc.StatusCode:
        """Waits for the end of the stream and returns its status."""
        with pytest.raises(grpc.RpcError):
            while True:
                next(self.call)
        self._outbox.put(None)
        return self.call.code()


@dataclass
class Worker:
    """A worker on a free port, with a client."""

    server: WorkerServer
    channel: grpc.Channel
    epochs: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def attach(self, **hello_fields: object) -> Attachment:
        """Attaches a new scheduler and receives the worker's description."""
        attachment = Attachment(self.channel, next(self.epochs), **hello_fields)
        attachment.receive_description()
        return attachment

    def describe(self) -> worker_pb2.DescribeResponse:
        return self.unary("Describe", worker_pb2.DescribeRequest(), worker_pb2.DescribeResponse)

    def unary(self, name: str, request: object, response: type) -> object:
        call = self.channel.unary_unary(
            f"/pagewire.v1.WorkerService/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return call(request, timeout=TIMEOUT_S)


@pytest.fixture
def start_worker() -> Iterator[Callable[[WorkerConfig], Worker]]:
    """Starts workers without a model; stops them after the test."""
    workers: list[Worker] = []

    def start(config: WorkerConfig) -> Worker:
        server = WorkerServer(config, on_failure=lambda: None)
        server.start()
        workers.append(Worker(server, grpc.insecure_channel(f"127.0.0.1:{server.port}")))
        return workers[-1]

    yield start
    for worker in workers:
        worker.channel.close()
        assert worker.server.stop(grace_s=patience(5))


@contextmanager
def serving(config: WorkerConfig, folder: Path) -> Iterator[Worker]:
    """A READY worker that serves a folder's model in float32."""
    server = WorkerServer(config, on_failure=lambda: None)
    server.start()
    server.lifecycle.load_model(folder, "float32", "")
    server.lifecycle.initialize_cache(config.num_kv_blocks)
    server.lifecycle.warm_up()
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    yield Worker(server, channel)
    channel.close()
    assert server.stop(grace_s=patience(5))


@pytest.fixture(scope="module")
def worker(llama_folder: Path) -> Iterator[Worker]:
    """A READY worker shared by a module's tests; each attachment resets it."""
    with serving(WORKER_CONFIG, llama_folder) as ready:
        yield ready


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def slow_runner() -> SlowRunner:
    return SlowRunner()


@contextmanager
def running_session(runner: FakeRunner) -> Iterator[Session]:
    compute, answers = ComputeThread(), ComputeThread("answers")
    yield Session(FakeLifecycle(runner), compute, answers)
    runner.gate.set()
    assert compute.stop(patience(5))
    assert answers.stop(patience(5))


@pytest.fixture
def session(runner: FakeRunner) -> Iterator[Session]:
    with running_session(runner) as made:
        yield made


@pytest.fixture
def slow_session(slow_runner: SlowRunner) -> Iterator[Session]:
    with running_session(slow_runner) as made:
        yield made


class InstallPackage(Protocol):
    """Installs a package of one module, whose entry points of a group lead into it by name."""

    def __call__(self, module: str, source: str, group: str, points: Mapping[str, str]) -> None: ...


@pytest.fixture
def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallPackage:
    def installed(module: str, source: str, group: str, points: Mapping[str, str]) -> None:
        site = tmp_path / "site"
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return installed
