"""Hybrids under a scheduler, by layers of ours: tokens equal transformers' own."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import NATIVE_HYBRIDS, write
from tests.worker_svc.transformers_models.test_served import Family

CONFIG = replace(test_served.CONFIG, model_impl="native")


@pytest.fixture(scope="module", params=NATIVE_HYBRIDS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name = request.param
    folder = write(name, tmp_path_factory.mktemp("hybrids") / name)
    with test_served.served(name, folder, CONFIG) as found:
        yield found


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker
