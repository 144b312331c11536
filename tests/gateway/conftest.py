"""A tiny tokenizer folder and a scheduler that answers with scripted tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gateway.process.config import GatewayConfig
from gateway.process.server import Gateway
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from simulator.workers.prompt_outputs import PromptOutputRequest
from tests.pace import paced, patience
from wire import columns

CORPUS = [
    "Hello world, how are you today? The capital of France is Paris.",
    "日本語と中文, emoji 😀🎉👩‍👩‍👧, naïve café, combining é, tabs\tand\nlines.",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
]
TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}: "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}No thinking.{% endif %}"
    "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_tokens(["<think>"])  # added, not special
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> Callable[[str], list[int]]:
    plain = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda text: plain.encode(text).ids


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers every request with the same tokens."""

    model: types_pb2.ModelInfo
    output: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=lambda: {"reason": types_pb2.FINISH_REASON_STOP})
    is_ready: bool = True
    reason: str = "no worker is attached"
    policy: str = ""
    max_num_seqs: int = 0
    tokens_per_step: int = 1
    hangs_after: int | None = None  # stops sending after this many tokens
    instance: int = 1
    breaks_on_submit: bool = False
    breaks_after: int | None = None  # tokens per attempt; the next one continues after them
    submits: list[Any] = field(default_factory=list)
    outboxes: list[asyncio.Queue[Any]] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    ended_sessions: list[Any] = field(default_factory=list)

    async def GetStatus(self, request: Any, context: Any) -> scheduler_pb2.GetStatusResponse:
        return scheduler_pb2.GetStatusResponse(
            ready=self.is_ready,
            reason="" if self.is_ready else self.reason,
            model=self.model,
            policy=self.policy,
            max_num_seqs=self.max_num_seqs,
        )

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.outboxes.append(outbox)
        tasks = [asyncio.create_task(self._read(requests, outbox))]
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, requests: Any, outbox: asyncio.Queue[Any]) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "hello":
                    greeting = scheduler_pb2.SessionGreeting(instance=self.instance)
                    outbox.put_nowait(scheduler_pb2.SessionResponse(greeting=greeting))
                    continue
                case "abort":
                    self.aborted.append(request.abort.handle)
                    continue
                case "end_session":
                    self.ended_sessions.append(request.end_session)
                    continue
                case None:
                    continue
            self.submits.append(request.submit)
            if self.breaks_on_submit:
                outbox.put_nowait(None)
                return
            self._answer(request.submit, outbox)
            if self.breaks_after is not None and self.is_cut(request.submit):
                outbox.put_nowait(None)
                return

    def num_output(self, submit: Any) -> int:
        """Number of output tokens that a submitted request has already."""
        num_tokens = len(submit.prompt_token_ids) // 4
        return num_tokens - submit.num_prompt_tokens if submit.HasField("num_prompt_tokens") else 0

    def is_cut(self, submit: Any) -> bool:
        assert self.breaks_after is not None
        return self.num_output(submit) + self.breaks_after < len(self.output)

    def _answer(self, submit: Any, outbox: asyncio.Queue[Any]) -> None:
        tell_of_prompt(submit, self.model.vocab_size, outbox)
        sampling = submit.sampling
        if submit.pooling or (sampling.HasField("max_tokens") and not sampling.max_tokens):
            self._finish(submit, outbox, num_tokens=0)
            return
        shown = self.output if self.hangs_after is None else self.output[: self.hangs_after]
        shown = shown[self.num_output(submit) :]
        if self.breaks_after is not None:
            shown = shown[: self.breaks_after]
        for start in range(0, len(shown), self.tokens_per_step):
            ids = shown[start : start + self.tokens_per_step]
            handles = columns.pack([submit.handle] * len(ids), columns.UINT32)
            outbox.put_nowait(
                scheduler_pb2.SessionResponse(handles=handles, token_ids=columns.pack(ids))
            )
        if self.hangs_after is None and (self.breaks_after is None or not self.is_cut(submit)):
            self._finish(submit, outbox)

    def finish_hanging(self, index: int = -1) -> None:
        """Ends a request, the last one by default, as if it had continued."""
        self._finish(self.submits[index], self.outboxes[-1])

    def _finish(
        self, submit: Any, outbox: asyncio.Queue[Any], num_tokens: int | None = None
    ) -> None:
        usage = types_pb2.Usage(
            prompt_tokens=len(submit.prompt_token_ids) // 4,
            completion_tokens=len(self.output) if num_tokens is None else num_tokens,
            cached_tokens=3,
        )
        finished = scheduler_pb2.Finished(handle=submit.handle, usage=usage, **self.end)
        outbox.put_nowait(scheduler_pb2.SessionResponse(finished=[finished]))

    def prompt_of(self, index: int) -> list[int]:
        return columns.unpack(self.submits[index].prompt_token_ids).tolist()

    def refuse(self, code: grpc.StatusCode, message: str) -> None:
        reason = types_pb2.FINISH_REASON_ERROR
        self.output = []
        self.end = {"reason": reason, "status_code": code.value[0], "message": message}


def tell_of_prompt(submit: Any, vocab_size: int, outbox: asyncio.Queue[Any]) -> None:
    """Reports on the prompt in two parts, with the simulator's values."""
    token_ids = columns.unpack(submit.prompt_token_ids)
    num_top, end = None, len(token_ids)
    if submit.sampling.HasField("prompt_logprobs"):
        num_top, end = submit.sampling.prompt_logprobs, end - 1
    elif not submit.pooling:
        return
    begin = end - 1 if submit.pooling == types_pb2.POOLING_LAST else 0
    prompt_request = PromptOutputRequest(submit.handle, token_ids, begin, end, num_top, vocab_size)
    for part in ((0, end // 2), (end // 2, end)):
        prompt_output = prompt_request.answer(*part)
        if prompt_output is not None:
            packed = types_pb2.PromptOutput(**prompt_output.pack())
            if prompt_output.logprobs is not None:
                packed.logprobs.CopyFrom(types_pb2.LogprobColumns(**prompt_output.logprobs.pack()))
            outbox.put_nowait(scheduler_pb2.SessionResponse(prompt_outputs=[packed]))


@dataclass
class Running:
    """A gateway with its scheduler."""

    gateway: Gateway
    scheduler: FakeScheduler
    http_url: str
    grpc_target: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    async def until_policy(self, policy: str) -> None:
        """Waits until the gateway knows the scheduler's policy."""
        self.gateway._link.changed.set()  # polls at once
        readiness = self.gateway._readiness
        await eventually(lambda: readiness.current.policy == policy, f"the policy is {policy}")


async def eventually(
    condition: Callable[[], bool], what: str, timeout_s: float = patience(5.0)
) -> None:
    """Waits until `condition()` is true."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Any]:
    return eventually


@pytest.fixture(scope="module")
def model_info(tokenizer: Tokenizer) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(
        model="tiny",
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size + 10,  # padded, as real models are
        max_model_len=256,
        eos_token_ids=[1],
        tokenizer_sha256=tokenizer.sha256,
        dtype="float32",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scheduler(
    model_info: types_pb2.ModelInfo,
) -> AsyncIterator[tuple[FakeScheduler, str]]:
    scheduler = FakeScheduler(model_info)
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield scheduler, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
def scheduler_server(
    shared_scheduler: tuple[FakeScheduler, str],
    model_info: types_pb2.ModelInfo,
    encode: Callable[[str], list[int]],
) -> tuple[FakeScheduler, str]:
    """The module's scheduler and its address, reset."""
    scheduler, address = shared_scheduler
    fresh = FakeScheduler(model_info, encode("Hello world"), outboxes=scheduler.outboxes)
    scheduler.__dict__.clear()
    scheduler.__dict__.update(fresh.__dict__)
    scheduler.model = types_pb2.ModelInfo.FromString(model_info.SerializeToString())
    return scheduler, address


async def run_gateway(folder: Path, tokenizer: Tokenizer, server: Any, **options: Any) -> Running:
    """A listening gateway; it may not be ready yet."""
    scheduler, address = server
    defaults = {
        "scheduler": address,
        "http_port": 0,
        "grpc_port": 0,
        "drain_timeout_s": paced(2.0),
        "gather_ms": 0,  # the scheduler and the clients keep this process busy
    }
    config = GatewayConfig(model=folder, **(defaults | options))
    gateway = Gateway(config, tokenizer)
    ports = await gateway.start()
    url, target = f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"
    client = httpx.AsyncClient(base_url=url, timeout=patience(10))
    return Running(gateway, scheduler, url, target, client, grpc.aio.insecure_channel(target))


async def end_gateway(running: Running) -> None:
    await running.http.aclose()
    await running.channel.close()
    await running.gateway.stop()


async def until_ready(running: Running) -> None:
    async with asyncio.timeout(patience(5)):
        while (await running.http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module")
async def start(
    model_folder: Path, tokenizer: Tokenizer, scheduler_server: tuple[FakeScheduler, str]
) -> AsyncIterator[Callable[..., Any]]:
    """Starts a gateway with the given options, and by default waits until it is ready."""
    started: list[Running] = []

    async def start_one(*, wait: bool = True, **options: Any) -> Running:
        running = await run_gateway(model_folder, tokenizer, scheduler_server, **options)
        started.append(running)
        if wait:
            await until_ready(running)
        return running

    yield start_one
    for running in started:
        await end_gateway(running)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(
    model_folder: Path, tokenizer: Tokenizer, shared_scheduler: tuple[FakeScheduler, str]
) -> AsyncIterator[Running]:
    running = await run_gateway(model_folder, tokenizer, shared_scheduler)
    yield running
    await end_gateway(running)


@pytest_asyncio.fixture(loop_scope="module")
async def running(shared_gateway: Running, scheduler_server: tuple[FakeScheduler, str]) -> Running:
    """The module's gateway, ready, with its scheduler reset."""
    await until_ready(shared_gateway)
    return shared_gateway
