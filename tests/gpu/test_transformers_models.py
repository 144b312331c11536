"""Models that transformers computes on a GPU: in graphs, with tokens equal to the library's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.worker_svc.conftest import serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import Oracle, write
from tests.worker_svc.transformers_models.test_served import Family
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Windows, softcaps, sinks, experts, multipliers, states: each with heads that the kernels serve.
NAMES = ["mistral", "gemma2", "gpt_oss", "qwen3_moe", "granite", "qwen3_5", "lfm2", "nemotron_h"]
CONFIG = replace(test_served.CONFIG, device="cuda")


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name = request.param
    sizes: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}
    folder = write(name, tmp_path_factory.mktemp("families") / name, sizes)
    oracle = Oracle(name, folder)
    prompts = [test_served.prompt_of(length) for length in test_served.LENGTHS]
    wanted = [oracle(prompt, test_served.NUM_TOKENS) for prompt in prompts]
    with serving(CONFIG, folder) as worker:
        yield Family(name, worker, prompts, wanted)


def runner_of(family: Family) -> ModelRunner:
    runner = family.worker.server.lifecycle.runner
    assert runner is not None
    return runner


def test_steps_are_recorded(family: Family) -> None:
    runner = runner_of(family)
    assert isinstance(runner, CudaRunner)
    assert runner.graph_batch_sizes
    assert (runner._step_graphs is None) is (family.name in test_served.HAVE_STATES)


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker
