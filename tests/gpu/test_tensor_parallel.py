"""Two ranks on two GPUs, with collectives inside CUDA graphs: the tokens of one GPU.

Also ranks that are killed or stopped, or lose their device, while streams run. A start takes
seconds, so the tests of a model family share one group.
"""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from pagewire.v1 import worker_pb2
from tests.pace import patience
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, make_prompt
from tests.worker_svc.parallel.test_tensor_parallel import save
from tests.worker_svc.ranks.test_ranks import RankGroup, run_requests, start_group
from tests.worker_svc.serving.test_service import generate
from worker_svc.config import WorkerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

READY_S = 120  # kernels are compiled at the first start
PROMPTS = [make_prompt(length, seed=length) for length in (1, 16, 31, 33)]
GREEDY = worker_pb2.RowSampling(top_p=1)
DICE = worker_pb2.RowSampling(temperature=0.8, top_p=0.95, seed=11)
GUMBEL = worker_pb2.RowSampling(temperature=0.8, top_p=1, seed=12)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RankGroup]]:
    """Starts groups; kills processes that a test leaves."""
    started: list[RankGroup] = []

    def run(name: str, **changes: str) -> RankGroup:
        options = {f"--{option.replace('_', '-')}": value for option, value in changes.items()}
        folder = save(tmp_path / f"model-{len(started)}", name)
        log_path = tmp_path / f"log-{len(started)}"
        started.append(start_group(folder, log_path, {"--device": "cuda", **options}))
        started[-1].wait_until_ready(timeout_s=READY_S)
        return started[-1]

    yield run
    for group in started:
        group.process.kill()
        group.process.wait()


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-one-kv-head", "qwen3-tied"])
def test_two_gpus_give_the_tokens_of_one(
    start: Callable[..., RankGroup],
    start_worker: Callable[[WorkerConfig], Worker],
    tmp_path: Path,
    name: str,
) -> None:
    one = start_worker(replace(WORKER_CONFIG, device="cuda"))
    one.server.lifecycle.load_model(save(tmp_path / "whole", name), "float32", "")
    one.server.lifecycle.initialize_cache(WORKER_CONFIG.num_kv_blocks)
    one.server.lifecycle.warm_up()
    group = start(name)
    with group.worker() as two:
        description = two.describe().description
        assert (description.world_size, description.attention_backend) == (2, "triton")
        assert description.all_reduce == "peer memory, nccl above 4096 KiB"
        assert description.graph_batch_sizes
        for sampling in (GREEDY, DICE, GUMBEL):
            expected = generate(one.attach(), PROMPTS, 24, sampling=sampling)
            for chunk in (9, 1000):
                assert generate(two.attach(), PROMPTS, 24, chunk=chunk, sampling=sampling) == (
                    expected
                )
    group.process.send_signal(signal.SIGTERM)
    assert group.process.wait(patience(30)) == 0


@pytest.mark.parametrize(
    ("rank", "number", "said"),
    [
        (1, signal.SIGKILL, "rank 1 ended with -9"),
        (1, signal.SIGSTOP, r"rank 1: no heartbeat for \d+\.\d s"),
        (0, signal.SIGSTOP, r"rank 0: no heartbeat for \d+\.\d s"),
    ],
)
def test_streams_end_as_if_nothing_had_happened_to_a_rank_on_a_gpu(
    start: Callable[..., RankGroup], rank: int, number: signal.Signals, said: str
) -> None:
    group = start("llama-biases")
    calm = asyncio.run(run_requests(group.port))
    harm = partial(os.kill, group.ranks[rank], number)
    assert asyncio.run(run_requests(group.port, harm)) == calm
    assert re.search(f"{said}: all ranks start again", group.log)


@pytest.mark.parametrize(
    ("failpoint", "said"),
    [
        # NCCL's watchdog may notice first and abort the process.
        ("lose-device@20", "(71, DEVICE_LOST|-6)"),
        ("hang-device@20", "72, STEP_OVERDUE"),  # rank 1 waits in a collective inside a graph
    ],
)
def test_streams_end_as_if_nothing_had_happened_to_a_device(
    start: Callable[..., RankGroup], failpoint: str, said: str
) -> None:
    group = start("llama-biases", failpoint=failpoint, step_limit_s="3")
    harmed = asyncio.run(run_requests(group.port))
    assert re.search(f"rank . ended with {said}: all ranks start again", group.log)
    assert asyncio.run(run_requests(group.port)) == harmed
