"""Families with experts, sinks or softcaps in C: tokens and bits on each instruction set.

Tokens are transformers' own, on every set. Their logits are the same bits however a sequence is
computed: whole, in chunks, token by token, and among other rows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import isa
from tests.worker_svc.models.test_equal_bits import NUM_TOKENS, WAYS, logits_of
from tests.worker_svc.mxfp4_checkpoints import save_mxfp4
from tests.worker_svc.transformers_models.families import Oracle, write
from tests.worker_svc.transformers_models.test_served import prompt_of
from worker_svc.models import load_model

CPU = torch.device("cpu")
NUM_NEW = 10  # tokens, after a prompt that is longer than the windows
MXFP4_SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}
FAMILIES = ("mixtral", "qwen2_moe", "dots1", "qwen3_moe", "gpt_oss", "gpt_oss_mxfp4", "gemma2")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A family's folder, a prompt, and what transformers continues it with."""

    folder: Path
    prompt: list[int]
    wanted: list[int]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    root, name = tmp_path_factory.mktemp("families"), request.param
    if name == "gpt_oss_mxfp4":
        save_mxfp4(write("gpt_oss", root / "plain", MXFP4_SIZES), root / "stored", root / "twin")
        folder, oracle = root / "stored", Oracle("gpt_oss", root / "twin")
    else:
        folder = write(name, root / name)
        oracle = Oracle(name, folder)
    prompt = prompt_of(NUM_TOKENS - NUM_NEW)
    wanted = oracle(prompt, NUM_NEW)
    assert oracle.smallest_lead > 1e-4, "another draw of weights would have clearer winners"
    return Checkpoint(folder, prompt, wanted)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small products, in which threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [one.name for one in isa.available()])
def test_tokens_are_those_of_transformers_and_bits_the_same_in_every_way(
    checkpoint: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(isa.VARIABLE, name)
    model = load_model(checkpoint.folder, torch.float32, CPU, 128)
    if model.attention_backend == "torch":
        pytest.skip(f"no C compiler for {name}")
    assert model.attention_backend == f"c/{name}"
    token_ids = torch.tensor(checkpoint.prompt + checkpoint.wanted)
    logits = logits_of(model, token_ids, [[NUM_TOKENS]])
    assert logits[-NUM_NEW - 1 : -1].argmax(1).tolist() == checkpoint.wanted
    for way, steps in WAYS.items():
        assert torch.equal(logits_of(model, token_ids, steps), logits), way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_are_the_same_in_two_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    model = load_model(checkpoint.folder, dtype, CPU, 128)
    if model.attention_backend == "torch":
        pytest.skip("no C compiler")
    token_ids = torch.tensor(checkpoint.prompt + checkpoint.wanted)
    logits = logits_of(model, token_ids, [[NUM_TOKENS]])
    assert logits.isfinite().all()
    for way, steps in WAYS.items():
        assert torch.equal(logits_of(model, token_ids, steps), logits), way
