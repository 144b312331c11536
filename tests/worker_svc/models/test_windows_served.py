"""Families with windows under a scheduler, by layers of ours: tokens equal transformers' own."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import write
from tests.worker_svc.transformers_models.test_served import Family

CONFIG = replace(test_served.CONFIG, model_impl="native")
NAMES = ("mistral", "gemma2", "gemma3", "gemma3_vl", "gemma4", "gemma4_moe")


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name = request.param
    folder = write(name, tmp_path_factory.mktemp("windows") / name)
    num_blocks = test_served.NUM_BLOCKS.get(name, CONFIG.num_kv_blocks)
    with test_served.served(name, folder, replace(CONFIG, num_kv_blocks=num_blocks)) as found:
        yield found


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker
