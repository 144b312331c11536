"""Two ranks on two GPUs, with collectives inside their graphs: the tokens of one GPU."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagewire.v1 import worker_pb2

from .conftest import WORKER_CONFIG, make_prompt, serving
from .test_ranks import RankGroup, start_group
from .test_service import generate
from .test_tensor_parallel import save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

READY_S = 300  # kernels are compiled at the first start
PROMPTS = [make_prompt(length, seed=length) for length in (1, 16, 31, 33)]
GREEDY = worker_pb2.RowSampling(top_p=1)
DICE = worker_pb2.RowSampling(temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(params=["llama-biases", "qwen2-one-kv-head", "qwen3-tied"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    log_path = tmp_path_factory.mktemp("ranks") / "log"
    made = start_group(folder, log_path, {"--device": "cuda"})
    try:
        made.wait_until_ready(timeout_s=READY_S)
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(30) == 0
    finally:
        made.process.kill()
        made.process.wait()


def test_two_gpus_give_the_tokens_of_one(group: RankGroup, folder: Path) -> None:
    alone = replace(WORKER_CONFIG, device="cuda")
    with serving(alone, folder) as one, group.worker() as two:
        description = two.describe().description
        assert (description.world_size, description.attention_backend) == (2, "triton")
        assert description.graph_batch_sizes
        for sampling in (GREEDY, DICE):
            expected = generate(one.attach(), PROMPTS, 24, sampling=sampling)
            for chunk in (9, 1000):
                assert generate(two.attach(), PROMPTS, 24, chunk=chunk, sampling=sampling) == (
                    expected
                )


def test_a_killed_rank_on_a_gpu_leads_to_a_new_start_with_the_same_tokens(group: RankGroup) -> None:
    with group.worker() as two:
        expected = generate(two.attach(), PROMPTS, 8, sampling=DICE)
        incarnation = two.describe().description.incarnation
    os.kill(group.ranks[1], signal.SIGKILL)
    group.wait_until_ready(times=2, timeout_s=READY_S)
    with group.worker() as two:
        assert two.describe().description.incarnation != incarnation
        assert generate(two.attach(), PROMPTS, 8, sampling=DICE) == expected
