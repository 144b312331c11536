"""By the C kernels a row has the same bits in every batch: with an adapter, and without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from tests.worker_svc.adapters.peft_folders import ATTENTION, MadeAdapter
from tests.worker_svc.models.test_models import Steps, make_prompts
from tests.worker_svc.random_models import Family, save_random_model
from worker_svc.adapters.reading import AdapterReader
from worker_svc.adapters.weights import AdapterRows, LoadedAdapter
from worker_svc.models import Decoder, load_model

LENGTHS = (20, 33, 7)
SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES: dict[str, tuple[Family, dict[str, Any], MadeAdapter]] = {
    "llama": ((LlamaConfig, LlamaForCausalLM), {}, MadeAdapter(rank=5)),
    "gemma3": (
        (Gemma3TextConfig, Gemma3ForCausalLM),
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        MadeAdapter(rank=5),
    ),
    "mixtral": (
        (MixtralConfig, MixtralForCausalLM),
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        MadeAdapter(ATTENTION, rank=5),
    ),
}


def logits_of(
    model: Decoder,
    prompts: list[Tensor],
    schedule: dict[int, int],
    adapted: dict[int, LoadedAdapter],
) -> dict[int, Tensor]:
    """Logits of some rows of one step, by the number of tokens and the adapter of each."""
    assert model.adaptable.step is not None
    first, found = 0, []
    for row, count in schedule.items():
        if row in adapted:
            found.append(AdapterRows(adapted[row], torch.arange(first, first + count)))
        first += count
    model.adaptable.step.rows = tuple(found)
    return dict(zip(schedule, Steps(model, prompts).run(schedule), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_the_same_bits_alone_and_among_others(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, changes, made = FAMILIES[name]
    theirs = save_random_model(tmp_path / "base", family, SHAPE | changes)
    made.save(theirs, tmp_path / "a")
    model = load_model(tmp_path / "base", dtype, torch.device("cpu"), 64)
    assert model.attention_backend.startswith("c/")
    prompts = make_prompts(*LENGTHS)
    plain = [Steps(model, prompts).run({row: LENGTHS[row]})[0] for row in range(3)]
    layers = model.adaptable
    layers.take()
    reader = AdapterReader(layers.targets, 16, layers.dtype, layers.pack)
    adapter = reader.read("a", tmp_path / "a")
    whole = dict(enumerate(LENGTHS))
    together = logits_of(model, prompts, whole, {0: adapter, 2: adapter})
    assert torch.equal(together[1], plain[1])
    for row in (0, 2):
        alone = logits_of(model, prompts, {row: LENGTHS[row]}, {row: adapter})
        assert torch.equal(together[row], alone[row])
        assert not torch.equal(together[row], plain[row])
    assert torch.equal(logits_of(model, prompts, whole, {})[0], plain[0])
