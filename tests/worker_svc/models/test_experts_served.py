"""Families with experts under a scheduler, by layers of ours: tokens equal transformers' own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.worker_svc.transformers_models import families, test_served
from tests.worker_svc.transformers_models.families import write
from tests.worker_svc.transformers_models.test_served import Family

CONFIG = replace(test_served.CONFIG, model_impl="native")
# By name: a family's checkpoint, and the sizes that differ.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "dots1": ("dots1", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "gpt_oss": ("gpt_oss", {}),
    "minimax_m2": ("minimax_m2", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),  # the first layer has one MLP
    "qwen3_moe_no_renorm": ("qwen3_moe", {"norm_topk_prob": False}),
}


@pytest.fixture(scope="module", params=CASES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name, sizes = CASES[request.param]
    folder = write(name, tmp_path_factory.mktemp("experts") / name, sizes)
    with test_served.served(name, folder, CONFIG) as found:
        yield found


def test_the_models_are_those_that_transformers_computes_too() -> None:
    assert {name for name, _ in CASES.values()} <= families.EXPERTS.keys()


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker
