"""Models with windows on a GPU: graphs have a block table for each KV group."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.worker_svc.transformers_models import test_windows
from tests.worker_svc.transformers_models.test_windows import Windowed
from worker_svc.runner.cuda_runner import CudaRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = replace(test_windows.CONFIG, device="cuda")
FAMILIES = ("gemma3", "gpt_oss", "mistral")


PARAMS = [(name, impl) for impl in ("transformers", "native") for name in FAMILIES]


@pytest.fixture(scope="module", params=PARAMS, ids=" by ".join)
def windowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Windowed]:
    name, impl = request.param
    folder = tmp_path_factory.mktemp("windows") / name
    config = replace(CONFIG, model_impl=impl)
    with test_windows.served(name, folder, config, {"head_dim": 16, "hidden_size": 64}) as found:
        yield found


def test_steps_are_recorded(windowed: Windowed) -> None:
    runner = windowed.worker.server.lifecycle.runner
    assert isinstance(runner, CudaRunner)
    assert runner.graph_batch_sizes
    assert runner.limits.kv_groups


test_groups = test_windows.test_the_scheduler_has_a_table_for_each_group
test_edges = test_windows.test_the_first_tokens_after_every_length_in_chunks_of_every_edge
test_prefixes = test_windows.test_a_cached_prefix_of_every_length_is_gone_on_from
test_swaps = test_windows.test_what_was_swapped_out_goes_on_with_the_same_tokens
test_forks = test_windows.test_siblings_get_the_tokens_that_they_would_get_alone
test_random = test_windows.test_random_requests_get_their_tokens_and_leave_no_page
