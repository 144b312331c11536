"""Two ranks as processes: one worker for the scheduler, restarted when a rank dies."""

import asyncio
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import debug_pb2, debug_pb2_grpc, scheduler_pb2, types_pb2, worker_pb2
from pagewire.v1.scheduler_pb2_grpc import (
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)
from scheduler_svc.engine import Engine
from scheduler_svc.service import SchedulerService
from scheduler_svc.worker.link import FencedOut
from tests.e2e.forks import warm
from tests.pace import paced, patience
from tests.scheduler_svc.conftest import service_config
from tests.worker_svc.conftest import (
    TIMEOUT_S,
    WORKER_CONFIG,
    Attachment,
    Worker,
    make_prompt,
    make_sequence,
)
from tests.worker_svc.parallel.test_tensor_parallel import save
from tests.worker_svc.serving.test_service import generate
from wire.columns import unpack
from wire.server import SERVER_OPTIONS, bind
from worker_svc.config import WorkerConfig

REPOSITORY = Path(__file__).parents[3]
NUM_TOKENS = 40  # of each of eight requests; a rank is harmed after 60 of all
RANK_TIMEOUT_S = math.ceil(paced(2))
OPTIONS = {
    "--tensor-parallel-size": "2",
    "--port": "0",
    "--device": "cpu",
    "--dtype": "float32",
    "--num-kv-blocks": str(WORKER_CONFIG.num_kv_blocks),
    "--max-num-seqs": str(WORKER_CONFIG.max_num_seqs),
    "--max-num-batched-tokens": str(WORKER_CONFIG.max_num_batched_tokens),
    "--max-model-len": str(WORKER_CONFIG.max_model_len),
    "--rank-timeout-s": str(RANK_TIMEOUT_S),
}


@dataclass
class RankGroup:
    """A group of two ranks, started by `worker_svc --tensor-parallel-size 2`."""

    process: warm.Started
    log_path: Path
    port: int = 0
    epochs: Iterator[int] = field(default_factory=lambda: count(1000))

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_until_ready(self, times: int = 1, timeout_s: float = 3 * TIMEOUT_S) -> None:
        """Waits until the group has been ready this number of times."""
        deadline_s = time.monotonic() + timeout_s
        while (said := self.log.split("ranks are ready, rank 0 on port ")[1:])[times - 1 :] == []:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.05)
        self.port = int(said[-1].split()[0])

    @property
    def num_starts(self) -> int:
        """Number of starts of all ranks."""
        return self.log.count("rank 0 is process")

    @property
    def ranks(self) -> list[int]:
        """Process ids by rank, of the last start."""
        started = re.findall(r"rank \d+ is process (\d+)\n", self.log)
        return [int(pid) for pid in started[-len(started) // self.num_starts :]]

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield Worker(None, channel, self.epochs)


def start_group(
    folder: Path, log_path: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> RankGroup:
    options = {**OPTIONS, **changes, "--model": str(folder)}
    arguments = [part for pair in options.items() for part in pair]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    process = warm.start("tests.e2e.forks.ranks", arguments, REPOSITORY, log_path, environ)
    return RankGroup(process, log_path)


@contextmanager
def running_group(
    folder: Path,
    log_path: Path,
    changes: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 3 * TIMEOUT_S,
) -> Iterator[RankGroup]:
    """A ready group, told to end after the block; none of its processes is left."""
    made = start_group(folder, log_path, changes)
    try:
        made.wait_until_ready(timeout_s=timeout_s)
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(TIMEOUT_S) == 0
        assert not [pid for pid in made.ranks if is_running(pid)]
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def group(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with running_group(llama_folder, tmp_path_factory.mktemp("ranks") / "log") as made:
        yield made


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_ranks_on_the_wire_give_the_tokens_of_one(
    group: RankGroup, worker: Worker, temperature: float
) -> None:
    sampling = worker_pb2.RowSampling(temperature=temperature, top_p=0.95, seed=11)
    prompts = [make_prompt(length, seed=length) for length in (1, 16, 31, 33)]
    with group.worker() as two:
        found = generate(two.attach(), prompts, 12, chunk=9, sampling=sampling)
    assert found == generate(worker.attach(), prompts, 12, sampling=sampling)


def test_grants_cuts_and_a_refused_step_keep_ranks_together(
    group: RankGroup, worker: Worker
) -> None:
    prompt = make_prompt(20)
    expected = generate(worker.attach(), [prompt], 28)[0]
    with group.worker() as two:
        attachment = two.attach()
        tokens = attachment.step(
            new_sequences=[make_sequence(0, prompt, [3, 1, 2])], slots=[0], num_scheduled=[20]
        )
        attachment.send(step_id=2, slots=[0], granted_steps=8)
        tokens += [token for _ in range(8) for token in receive_tokens(attachment)]
        attachment.send(step_id=10, slots=[0], granted_steps=16)
        cut = worker_pb2.Cut(first_step_id=10, last_step_id=25)
        attachment.send_raw(worker_pb2.AttachRequest(cut=cut))
        tokens += tokens_until_cut(attachment, 10)
        attachment.send(step_id=26, slots=[0])
        tokens += receive_tokens(attachment)
        assert len(tokens) >= 10
        assert tokens == expected[: len(tokens)]
        attachment.send(step_id=27, slots=[1])  # the slot is empty
        assert attachment.status() is grpc.StatusCode.INVALID_ARGUMENT
        assert generate(two.attach(), [prompt], 28)[0] == expected


def receive_tokens(attachment: Attachment) -> list[int]:
    output = attachment.receive()
    assert output.error == ""
    return unpack(output.token_ids).tolist()


def tokens_until_cut(attachment: Attachment, first_step_id: int) -> list[int]:
    """Reads outputs of granted steps from this one on, up to the cut; returns their tokens."""
    tokens: list[int] = []
    num_computed = None
    while num_computed is None or len(tokens) < num_computed:
        frame = next(attachment.call)
        if frame.HasField("skipped"):
            num_computed = frame.skipped.first_step_id - first_step_id
        else:
            tokens += unpack(frame.output.token_ids).tolist()
    return tokens


def test_every_rank_says_how_it_is_and_what_it_holds(group: RankGroup) -> None:
    with group.worker() as two:
        attachment = Attachment(two.channel, next(group.epochs))
        description = attachment.receive_description()
        attachment.step(new_sequences=[make_sequence(0, [5, 6, 7], [1])], slots=[0])
        assert (description.rank, description.world_size) == (0, 2)
        assert description.all_reduce == "gloo"
        assert description.rank_addresses[0] == f"127.0.0.1:{group.port}"
        for address in description.rank_addresses:
            with grpc.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service="pagewire.v1.WorkerService"),
                    timeout=TIMEOUT_S,
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING
                debug = debug_pb2_grpc.DebugServiceStub(channel)
                wait_for_steps(debug)
                assert debug.ListRequests(debug_pb2.ListRequestsRequest()).total == 1


def wait_for_steps(debug: debug_pb2_grpc.DebugServiceStub) -> None:
    """Waits for ranks other than 0, which may finish a moment after the answer."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not debug.ListRequests(debug_pb2.ListRequestsRequest(), timeout=TIMEOUT_S).total:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


async def run_requests(port: int, harm: Callable[[], None] | None = None) -> list[list[int]]:
    """Runs eight requests through a scheduler, in chunks; calls `harm` midway."""
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    engine = Engine(service_config(port, **options))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SchedulerServiceServicer_to_server(SchedulerService(engine), server)
    own_port = bind(server, "127.0.0.1:0", "test")
    await server.start()
    running = asyncio.create_task(engine.run())
    try:
        async with (
            asyncio.timeout(patience(120)),
            grpc.aio.insecure_channel(f"127.0.0.1:{own_port}") as ch,
        ):
            while not engine.is_ready:
                await asyncio.sleep(0.02)
            stub = SchedulerServiceStub(ch)
            calls = [asyncio.create_task(run_request(stub, index)) for index in range(8)]
            if harm is not None:
                core = engine.groups[0].core
                while core.num_output_tokens < 60:
                    await asyncio.sleep(0.002)
                harm()
            return await asyncio.gather(*calls)
    finally:
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError | FencedOut)
        await server.stop(None)


async def run_request(stub: SchedulerServiceStub, index: int) -> list[int]:
    prompt = make_prompt(20) + make_prompt(3 + 5 * index, seed=index)
    sampling = types_pb2.SamplingParams(
        temperature=index % 2, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_token_ids=prompt, sampling=sampling
    )
    tokens: list[int] = []
    async for response in stub.Generate(request):
        tokens += response.token_ids
    return tokens


@pytest.fixture(scope="module")
def calm(worker: Worker) -> list[list[int]]:
    """The requests' outputs without a disturbance."""
    tokens = asyncio.run(run_requests(worker.server.port))
    assert [len(each) for each in tokens] == [NUM_TOKENS] * 8
    return tokens


@pytest.mark.parametrize(
    ("rank", "number", "said"),
    [
        (1, signal.SIGKILL, "rank 1 ended with -9: all ranks start again"),
        (0, signal.SIGKILL, "rank 0 ended with -9: all ranks start again"),
        (1, signal.SIGSTOP, r"rank 1: no heartbeat for (\d+\.\d) s: all ranks start again"),
    ],
)
def test_streams_end_as_if_nothing_had_happened_when_a_rank_is_killed_or_stopped(
    group: RankGroup, calm: list[list[int]], rank: int, number: signal.Signals, said: str
) -> None:
    before, logged = group.ranks, len(group.log)
    tokens = asyncio.run(run_requests(group.port, lambda: os.kill(before[rank], number)))
    assert tokens == calm
    group.wait_until_ready(group.num_starts)
    found = re.search(said, group.log[logged:])
    assert found is not None
    for silent_s in found.groups():  # at the latest where the limit has grown to its bound
        assert RANK_TIMEOUT_S <= float(silent_s) < 5 * RANK_TIMEOUT_S + patience(1)
    waits = r"line \d+ in (all_reduce|gather)"  # rank 0, for what the other one does not send
    has_said_where = re.search(waits, group.log[logged:]) is not None
    assert has_said_where is (number is signal.SIGSTOP)
    assert not [pid for pid in before if is_running(pid)]
    assert asyncio.run(run_requests(group.port)) == calm


def test_a_group_whose_model_cannot_be_loaded_says_why_and_exits_with_1(
    llama_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "there"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    group = start_group(folder, tmp_path / "log")
    assert group.process.wait(2 * TIMEOUT_S) == 1
    assert "final_logit_softcapping" in group.log
    assert "before the group was ready" in group.log
    assert not [pid for pid in group.ranks if is_running(pid)]


def test_ranks_end_with_the_process_that_started_them(llama_folder: Path, tmp_path: Path) -> None:
    group = start_group(llama_folder, tmp_path / "log")
    group.wait_until_ready()
    group.process.kill()
    group.process.wait()
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(is_running(pid) for pid in group.ranks):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.skipif(
    not os.environ.get("PAGEWIRE_EIGHT_RANKS"),
    reason="starts sixteen processes; PAGEWIRE_EIGHT_RANKS=1 runs it",
)
def test_eight_ranks_that_share_two_kv_heads_lose_one_and_give_the_tokens_of_one(
    tmp_path: Path, start_worker: Callable[[WorkerConfig], Worker]
) -> None:
    folder = save(tmp_path / "model", "llama-eight-heads")
    one = start_worker(WORKER_CONFIG)
    one.server.lifecycle.load_model(folder, "float32", "")
    one.server.lifecycle.initialize_cache(WORKER_CONFIG.num_kv_blocks)
    one.server.lifecycle.warm_up()
    expected = asyncio.run(run_requests(one.server.port))
    eight = start_group(folder, tmp_path / "log", {"--tensor-parallel-size": "8"})
    try:
        eight.wait_until_ready()
        assert len(eight.ranks) == 8
        harm = partial(os.kill, eight.ranks[5], signal.SIGKILL)
        assert asyncio.run(run_requests(eight.port, harm)) == expected
        assert "rank 5 ended with -9: all ranks start again" in eight.log
    finally:
        eight.process.kill()
        eight.process.wait()
