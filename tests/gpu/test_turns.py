"""Sessions of hybrids on a GPU: snapshots of states are made and read next to graphs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.worker_svc.conftest import Worker, serving
from tests.worker_svc.transformers_models import test_turns
from tests.worker_svc.transformers_models.families import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = replace(test_turns.CONFIG, device="cuda")


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    sizes = {"head_dim": 16, "hidden_size": 64}
    sizes["max_position_embeddings"] = test_turns.MAX_MODEL_LEN
    folder = write(request.param, tmp_path_factory.mktemp("turns") / request.param, sizes)
    with serving(CONFIG, folder) as served:
        yield served


test_turns_hit = test_turns.test_turns_hit_four_fifths_and_answer_as_without_a_cache
