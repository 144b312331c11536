"""One family of layers of ours on CUDA, in float32: `test_native_families.py` runs each by this.

`FAMILY=qwen3_5 python -m pytest tests/gpu/native_family.py` does so alone.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scheduler_svc.engine import Engine
from tests.worker_svc.conftest import serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import Oracle, write
from tests.worker_svc.transformers_models.test_served import Family
from worker_svc.models.decoder import Decoder
from worker_svc.runner.cuda_runner import ComputePlan, CudaRunner

LEAST_LEAD = 2e-3  # of a logit over the next one, which sums in another order do not take away
SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}  # heads that the kernels serve


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny checkpoint, and what computes it."""

    written: str = ""  # the checkpoint's name in `families`; empty: that of the case
    is_fused: bool = True  # else it is composed
    is_recorded: bool = True  # else torch computes it alone, one step after the other
    sizes: dict[str, Any] = field(default_factory=dict)  # that differ


COMPOSED = Case(is_fused=False)
BY_TORCH = Case(is_recorded=False)
CLEAR = {"initializer_range": 0.3}  # other weights, where the first have no clear winners
CASES = {
    "deepseek_v3": COMPOSED,
    "dots1": Case(sizes=CLEAR),
    "gemma2": Case(),
    "gemma3": Case(),
    "gemma3_vl": Case(sizes={"initializer_range": 0.2}),
    "gemma4": BY_TORCH,
    "gemma4_moe": BY_TORCH,
    "glm4_moe": Case(),
    "glm4_moe_groups": Case("glm4_moe", sizes={"n_group": 2, "topk_group": 1}),
    "glm4_moe_lite": COMPOSED,
    "gpt_oss": Case(),
    "granite": Case(),
    "granite_hybrid": COMPOSED,
    "lfm2": COMPOSED,
    "lfm2_moe": COMPOSED,
    "minimax_m2": Case(),
    "mistral": Case(),
    "mixtral": Case(),
    "nemotron_h": COMPOSED,
    "qwen2_moe": Case(),
    "qwen3_5": COMPOSED,
    "qwen3_5_moe": COMPOSED,
    "qwen3_5_vl": COMPOSED,
    "qwen3_moe": Case(sizes={"norm_topk_prob": True}),
    "qwen3_moe_no_renorm": Case("qwen3_moe", sizes={"norm_topk_prob": False}),
    "qwen3_next": COMPOSED,
    "smollm3": Case(),
}
CONFIG = replace(
    test_served.CONFIG,
    device="cuda",
    model_impl="native",
    num_kv_blocks=40,  # eight sequences have no room in them
    max_model_len=112,
    state_snapshots=24,
)
# Of a prompt's beginnings: around chunks, and what a snapshot of states is worth.
LENGTHS = sorted({*range(1, 104, 4), 2, 3, 15, 16, 63, 64, 65, 66, 67, 80})


@pytest.fixture(scope="module")
def case() -> Case:
    return CASES[os.environ["FAMILY"]]


@dataclass(frozen=True, slots=True)
class Served:
    """A family in a worker, and the token after each of some beginnings of a prompt."""

    family: Family
    prompt: list[int]
    next_tokens: dict[int, int]  # by the beginning's length, where one token is a clear winner


@pytest.fixture(scope="module")
def served(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = case.written or os.environ["FAMILY"]
    folder = write(name, tmp_path_factory.mktemp("native") / name, SIZES | case.sizes)
    oracle = Oracle(name, folder)
    prompts = [test_served.prompt_of(length) for length in test_served.LENGTHS]
    wanted = [oracle(prompt, test_served.NUM_TOKENS) for prompt in prompts]
    assert oracle.smallest_lead > LEAST_LEAD, "another draw of weights would have clearer winners"
    prompt, next_tokens = test_served.prompt_of(LENGTHS[-1]), {}
    for length in LENGTHS:
        oracle.smallest_lead = float("inf")
        (token,) = oracle(prompt[:length], 1)
        if oracle.smallest_lead > LEAST_LEAD:
            next_tokens[length] = token
    with serving(CONFIG, folder) as worker:
        yield Served(Family(name, worker, prompts, wanted), prompt, next_tokens)


@pytest.fixture
def family(served: Served) -> Family:
    return served.family


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched kernel by kernel."""
    monkeypatch.setattr(CudaRunner, "_plan", lambda *args: ComputePlan(is_plain=False))


def test_its_layers_are_recorded(family: Family, case: Case) -> None:
    runner = family.worker.server.lifecycle.runner
    assert runner is not None
    model = runner._model
    assert isinstance(model, Decoder)
    assert isinstance(runner, CudaRunner) is case.is_recorded
    if not isinstance(runner, CudaRunner):
        assert model.stack is None
        return
    assert (model.fused is not None, model.composed is not None) == (
        case.is_fused,
        not case.is_fused,
    )
    assert model.stack is not None
    assert runner.graph_batch_sizes
    assert (runner._step_graphs is not None) is model.stack.splits


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker


@pytest.mark.usefixtures("by_kernels")
async def test_one_at_a_time_without_graphs(family: Family) -> None:
    await test_one_at_a_time(family)


@pytest.mark.usefixtures("by_kernels")
async def test_eight_at_a_time_without_graphs(family: Family) -> None:
    await test_eight_at_a_time(family)


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "cold"])
async def test_the_token_after_every_beginning(served: Served, is_cached: bool) -> None:
    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        return [await test_served.generate(stub, served.prompt[:n], 1) for n in served.next_tokens]

    assert len(served.next_tokens) > len(LENGTHS) // 2
    found, engine = await test_served.under_a_scheduler(
        served.family.worker, each, enable_prefix_caching=is_cached
    )
    assert [token for (token,) in found] == list(served.next_tokens.values())
    assert (engine.groups[0].core.counters.prefix_hit_tokens > 0) is is_cached
