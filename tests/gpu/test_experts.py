"""Families with experts on a GPU, by layers of ours: in graphs, with tokens of transformers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.worker_svc.conftest import serving
from tests.worker_svc.models.test_experts_served import CASES
from tests.worker_svc.mxfp4_checkpoints import save_mxfp4
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import Oracle, write
from tests.worker_svc.transformers_models.test_served import Family
from worker_svc.models.decoder import Decoder
from worker_svc.runner.cuda_runner import CudaRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = replace(test_served.CONFIG, device="cuda", model_impl="native")
SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}  # heads that the kernels serve


MXFP4 = "gpt_oss_mxfp4"  # its codes stay, and its kernels widen them


@pytest.fixture(scope="module", params=[*CASES, MXFP4])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name, sizes = CASES.get(request.param, ("gpt_oss", {}))
    root = tmp_path_factory.mktemp("experts")
    folder = twin = write(name, root / name, SIZES | sizes)
    if request.param == MXFP4:
        save_mxfp4(folder, root / "stored", root / "twin")
        folder, twin = root / "stored", root / "twin"
    oracle = Oracle(name, twin)
    prompts = [test_served.prompt_of(length) for length in test_served.LENGTHS]
    wanted = [oracle(prompt, test_served.NUM_TOKENS) for prompt in prompts]
    with serving(CONFIG, folder) as worker:
        yield Family(name, worker, prompts, wanted)


def test_steps_are_recorded(family: Family) -> None:
    runner = family.worker.server.lifecycle.runner
    assert isinstance(runner, CudaRunner)
    model = runner._model
    assert isinstance(model, Decoder)
    assert model.stack is not None and model.spec.has_experts
    assert runner.graph_batch_sizes


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker
