"""Layers with windows against transformers, around the window's length in every way."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.worker_svc.models.test_models import (
    MAX_MODEL_LEN,
    MISTRAL,
    NO_IDS,
    QWEN2,
    QWEN3,
    SHAPE,
    SMOLLM3,
    Steps,
    assert_same,
    expected_logits,
    make_prompts,
)
from tests.worker_svc.random_models import Family, save_random_model
from tests.worker_svc.runner.interpreted import needs_interpreter
from worker_svc.models import Decoder, compiled, linear, load_model

WINDOW = 12  # within a block of 16, so that it begins and ends at other places than blocks
LENGTHS = range(WINDOW - 2, WINDOW + 3)
SLIDING, FULL = "sliding_attention", "full_attention"
QWEN = {"sliding_window": WINDOW, "use_sliding_window": True, "hidden_size": 64}
CHECKPOINTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "mistral": (MISTRAL, {"hidden_size": 64, "head_dim": 16, "sliding_window": WINDOW}),
    "qwen2-last-layers": (QWEN2, QWEN | {"max_window_layers": 1}),
    "qwen3-listed": (QWEN3, QWEN | {"head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING]}),
    "smollm3": (SMOLLM3, NO_IDS | QWEN | {"no_rope_layer_interval": 2}),
}
EXPERTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "mixtral": (
        (MixtralConfig, MixtralForCausalLM),
        {"sliding_window": WINDOW, "num_local_experts": 4, "head_dim": 16},
    ),
    "qwen3_moe": (
        (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        QWEN | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}
Pair = tuple[Path, PreTrainedModel]


def in_each_way(names: Iterable[str], interpreted: Collection[str]) -> pytest.MarkDecorator:
    """Each checkpoint by torch and by C, and some by Triton, whose interpreter is slow.

    A window in some layers launches every kernel; the other checkpoints differ in how their
    configuration is read.
    """
    cases = [(name, by) for name in names for by in ("torch", "c")]
    by_triton = [pytest.param(name, "triton", marks=needs_interpreter) for name in interpreted]
    return pytest.mark.parametrize(("name", "by"), [*cases, *by_triton])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    shape = SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 2}
    return made_once(tmp_path_factory, CHECKPOINTS, shape)


def made_once(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: Mapping[str, tuple[Family, dict[str, Any]]],
    shape: dict[str, Any],
) -> Callable[[str], Pair]:
    """A function from a checkpoint's name to its folder and the model of transformers."""

    @cache
    def get(name: str) -> Pair:
        folder, (family, changes) = tmp_path_factory.mktemp(name), checkpoints[name]
        return folder, save_random_model(folder, family, shape | changes)

    return get


def load(folder: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The model by layers of torch, of C, or of Triton's interpreter."""
    device = torch.device("cpu")
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "1" if by == "c" else "0")
    if by == "triton":
        monkeypatch.setattr(compiled, "supports", lambda heads, kinds: False)
        monkeypatch.setattr(linear, "pack", lambda weight, bias: None)
    model = load_model(folder, torch.float32, device, MAX_MODEL_LEN)
    if by == "triton":
        model.fused = model._fuse()
    assert model.attention_backend.partition("/")[0] == by
    return model


def cuts(by: str) -> Sequence[int]:
    """Lengths around a window's; where Triton is interpreted one less, as many and one more."""
    return LENGTHS[1:-1] if by == "triton" else LENGTHS


def in_chunks(model: Decoder, prompts: list[Tensor], chunks: list[list[int]]) -> list[Tensor]:
    """Logits of prompts that are computed in these chunks, one chunk of each in a step."""
    steps = Steps(model, prompts)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for at in range(max(map(len, chunks))):
        scheduled = {row: own[at] for row, own in enumerate(chunks) if at < len(own)}
        for row, logits in zip(scheduled, steps.run(scheduled), strict=True):
            parts[row].append(logits)
    return [torch.cat(own) for own in parts]


@pytest.mark.usefixtures("few_programs")
@in_each_way(CHECKPOINTS, ("qwen3-listed",))
def test_prompts_around_a_windows_length_whole_and_then_token_by_token(
    checkpoint: Callable[[str], Pair], name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, theirs = checkpoint(name)
    ours = load(folder, by, monkeypatch)
    decoded = 4
    prompts = make_prompts(*(length + decoded for length in cuts(by)))
    chunks = [[length] + [1] * decoded for length in cuts(by)]
    for prompt, logits in zip(prompts, in_chunks(ours, prompts, chunks), strict=True):
        assert_same(logits, expected_logits(theirs, prompt))


@pytest.mark.usefixtures("few_programs")
@in_each_way(CHECKPOINTS, ("qwen3-listed",))
def test_chunks_that_end_around_a_windows_length(
    checkpoint: Callable[[str], Pair], name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several windows, cut at each place once, and one that is nearly whole at first."""
    folder, theirs = checkpoint(name)
    ours = load(folder, by, monkeypatch)
    length = 3 * WINDOW + 5
    chunks = [[cut, cut, length - 2 * cut] for cut in cuts(by)] + [[length - 2, 1, 1]]
    prompts = make_prompts(*([length] * len(chunks)))
    for prompt, logits in zip(prompts, in_chunks(ours, prompts, chunks), strict=True):
        assert_same(logits, expected_logits(theirs, prompt))


@pytest.mark.parametrize("by", ["torch", "c"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Callable[[str], Pair], name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, theirs = checkpoint(name)
    ours = load(folder, by, monkeypatch)
    prompts = make_prompts(7, 40)
    expected = [greedy(theirs, prompt, 3 * WINDOW) for prompt in prompts]
    rows = [
        torch.cat((prompt, torch.tensor(tokens)))
        for prompt, tokens in zip(prompts, expected, strict=True)
    ]
    steps = Steps(ours, rows)
    found = [[int(logits[-1].argmax())] for logits in steps.run({0: 7, 1: 40})]
    for _ in range(3 * WINDOW - 1):
        for tokens, logits in zip(found, steps.run({0: 1, 1: 1}), strict=True):
            tokens.append(int(logits[-1].argmax()))
    assert found == expected


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_after_attention_over_windows(name: str, tmp_path: Path) -> None:
    """All layers of these have the window, whatever `max_window_layers` says."""
    family, changes = EXPERTS[name]
    shape = SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 2} | changes
    theirs = save_random_model(tmp_path, family, shape)
    ours = load_model(tmp_path, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    assert {layer.mixer.window for layer in ours.spec.layers} == {WINDOW}
    (prompt,) = make_prompts(3 * WINDOW)
    (logits,) = in_chunks(ours, [prompt], [[WINDOW + 1, 1, 2 * WINDOW - 2]])
    assert_same(logits, expected_logits(theirs, prompt))


def greedy(theirs: PreTrainedModel, prompt: Tensor, count: int) -> list[int]:
    ids = prompt[None]
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
