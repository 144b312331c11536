"""Workers that have KV groups, and the pages that kernels are compiled ahead for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker_svc.transformers_models.families import write
from worker_svc.config import WorkerConfig
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.spec import ModelSpec
from worker_svc.startup import kernel_compiler, kv_groups, startup

META = torch.device("meta")
CONFIG = WorkerConfig(device="cuda", max_model_len=64)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Eight layers, of which two see all tokens: their pages have three times the block size."""
    folder = write("gemma3", tmp_path_factory.mktemp("windows") / "gemma3", {"head_dim": 16})
    spec = model_config.load(folder)
    windowed = next(layer for layer in spec.layers if layer.attention.window)
    full = next(layer for layer in spec.layers if not layer.attention.window)
    return replace(spec, layers=(windowed, windowed, windowed, full) * 2)


def decoder(spec: ModelSpec, kv_dtype: torch.dtype = torch.bfloat16) -> Decoder:
    model = Decoder(spec, torch.bfloat16, META, 64, kv_dtype=kv_dtype)
    model.pack()
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"kv_groups": "one"},
        {"attention_backend": "flash-attn"},
        {"draft_model": Path("drafts")},
    ],
)
def test_options_that_leave_one_table(gemma: ModelSpec, options: dict[str, Any]) -> None:
    model = decoder(gemma)
    assert model.fused is not None
    assert kv_groups.plan_for(CONFIG, model, 64) is not None
    assert kv_groups.plan_for(replace(CONFIG, **options), model, 64) is None


def test_a_cache_in_fp8_has_one_table(gemma: ModelSpec) -> None:
    assert decoder(gemma, torch.float8_e4m3fn).kv_plan(16, 64) is None


def test_layers_of_a_rehearsal_see_the_pages_of_the_whole_model(gemma: ModelSpec) -> None:
    limits = startup.shape_limits(CONFIG, "cuda", 64, gemma.vocab_size)
    plan = gemma.kv_plan(limits.block_size, 64, torch.bfloat16)
    few = decoder(gemma.rehearsed())
    found = kernel_compiler._plan(gemma, few, limits)
    assert plan is not None and found is not None
    assert found.groups == plan.groups and found.page_width == plan.page_width
    assert [group.block_size for group in plan.groups] == [48, 16]
    # A layer of each kind, and the last kind once more: the pages are not those of three layers.
    windows = [found.groups[place.group].window for place in found.places]
    assert windows == [kind.window for kind in few.kinds]
    of_few = gemma.rehearsed().kv_plan(limits.block_size, 64, torch.bfloat16)
    assert of_few is None or of_few.groups != found.groups
    # The same layers again, as the rehearsal of a worker that has them all.
    whole = decoder(gemma)
    assert whole.fused is not None
    short = whole.fused.rehearsed()
    assert [plan.places[index].group for index in short._places] == [
        place.group for place in found.places
    ]
