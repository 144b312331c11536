"""Windows of layers of ours on the CPU, in C and by torch: a block table for each KV group."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.worker_svc.transformers_models import test_windows
from tests.worker_svc.transformers_models.test_windows import Windowed
from worker_svc.models import compiled

PATHS = {
    "gemma2": "c/",
    "gemma3": "c/",
    "mistral": "c/",
    "gemma3 by torch": "torch",
    "gemma4": "torch",
}


@pytest.fixture(scope="module", params=list(PATHS))
def windowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Windowed]:
    name, folder = request.param.split()[0], tmp_path_factory.mktemp("native") / "model"
    config = replace(test_windows.CONFIG, model_impl="native")
    with pytest.MonkeyPatch.context() as patch:
        if request.param != name:
            patch.setattr(compiled, "supports", lambda *_: False)
        with test_windows.served(name, folder, config) as found:
            backend = found.worker.describe().description.attention_backend
            assert backend.startswith(PATHS[request.param])
            yield found


test_groups = test_windows.test_the_scheduler_has_a_table_for_each_group
test_edges = test_windows.test_the_first_tokens_after_every_length_in_chunks_of_every_edge
test_prefixes = test_windows.test_a_cached_prefix_of_every_length_is_gone_on_from
test_swaps = test_windows.test_what_was_swapped_out_goes_on_with_the_same_tokens
test_forks = test_windows.test_siblings_get_the_tokens_that_they_would_get_alone
test_random = test_windows.test_random_requests_get_their_tokens_and_leave_no_page
