"""Hybrids by layers of ours against transformers: prompts in all cuts, and snapshots in them."""

import itertools
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.kernels.interpreted import mend_products, quicken
from tests.worker_svc.models.test_models import (
    Steps,
    expected_logits,
    make_prompts,
)
from tests.worker_svc.parallel.test_tensor_parallel import on_ranks
from tests.worker_svc.transformers_models.families import NATIVE_HYBRIDS, WITH_PICTURES, write
from worker_svc.attention.batch import StateCut
from worker_svc.models import Decoder, decoder, load_model
from worker_svc.parallel.group import ALONE, Group
from worker_svc.states.in_place import InPlaceStep

LONG = 131  # tokens: two chunks of the rule, and some
Pair = tuple[Decoder, PreTrainedModel]
# States on copies by torch; of one family of each kind of layer also in place, by CUDA's kernels.
WAYS = [(name, "copies") for name in NATIVE_HYBRIDS]
WAYS += [(name, "in place") for name in ("qwen3_next", "nemotron_h", "lfm2")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function from a family's name to its model by layers of ours and by transformers."""

    @cache
    def get(name: str) -> Pair:
        folder = written(name, tmp_path_factory.mktemp(name))
        auto = AutoModelForImageTextToText if name in WITH_PICTURES else AutoModelForCausalLM
        theirs = auto.from_pretrained(folder, dtype=torch.float32).eval()
        limit_steps_alike(theirs)
        return load_model(folder, torch.float32, torch.device("cpu"), 160), theirs

    return get


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways in which states are updated; Triton's kernels are interpreted."""
    if request.param == "copies":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled, and these models are on the CPU")
    quicken()
    mend_products()
    monkeypatch.setattr(decoder, "StateStep", InPlaceStep)


def limit_steps_alike(theirs: PreTrainedModel) -> None:
    """Gives Nemotron-H the limits of its configuration.

    transformers raises steps to `time_step_min` in prompts, and does not in tokens that follow one
    by one: a result would depend on how a prompt is cut.
    """
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(theirs.config.time_step_limit)


def written(name: str, folder: Path) -> Path:
    """A checkpoint whose norms and step sizes are no constants, of Qwen with heads that draft."""
    write(name, folder, {"max_position_embeddings": 160})
    path = folder / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(3)
    for values in tensors.values():
        if values.dim() == 1:
            values += 0.3 * torch.randn(values.shape)
    if name.startswith("qwen"):
        tensors["mtp.fc.weight"] = torch.ones(3)
    save_file(tensors, path, {"format": "pt"})
    return folder


def stack_experts(folder: Path) -> None:
    """Puts the experts of each layer into one tensor, as released checkpoints have them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gates = sorted(name for name in tensors if ".experts.0.gate_proj." in name)
    assert gates
    for gate in gates:
        prefix = gate.partition(".0.gate_proj")[0]
        parts: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
        for (kind, own), index in itertools.product(parts.items(), range(4)):
            own.append(tensors.pop(f"{prefix}.{index}.{kind}_proj.weight"))
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    save_file(tensors, path, {"format": "pt"})


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits are as near as transformers' own in one pass and token by token.

    A few tokens in a long prompt have much larger errors than the others, by rounding.
    """
    errors = (ours - expected).abs().amax(-1)
    assert errors.max() < 5e-3
    assert errors.median() < 5e-5


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("name", "way"), WAYS, indirect=["way"])
def test_logits_of_prompts_of_every_cut(name: str, pair: Callable[[str], Pair]) -> None:
    ours, theirs = pair(name)
    prompts = make_prompts(LONG, 66, 5, 1)
    expected = [expected_logits(theirs, prompt) for prompt in prompts]
    steps = Steps(ours, prompts)
    # Chunks that end inside the convolution, 1 after a chunk of the rule, and mixed with others.
    schedule = [
        {0: 2, 3: 1},
        {0: 1, 1: 65},
        {0: 64, 1: 1, 2: 2},
        {0: 1, 2: 1},
        {0: 60, 2: 2},
        *[{0: 1}] * 3,
    ]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for scheduled in schedule:
        for row, logits in zip(scheduled, steps.run(scheduled), strict=True):
            found[row].append(logits)
    for parts, wanted in zip(found, expected, strict=True):
        assert_near(torch.cat(parts), wanted)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("name", "way"), WAYS, indirect=["way"])
def test_a_snapshot_inside_a_chunk_is_the_state_there(
    name: str, pair: Callable[[str], Pair]
) -> None:
    ours, theirs = pair(name)
    (prompt,) = make_prompts(70)
    expected = expected_logits(theirs, prompt)
    steps = Steps(ours, [prompt, prompt])
    cuts = (StateCut(0, 1, 1), StateCut(0, 65, 2))
    first, other = steps.run({0: 68, 1: 65}, cuts)
    assert_near(first, expected[:68])
    assert_near(other, expected[:65])
    assert ours.states is not None
    for snapshot, begin, end in ((2, 65, 68), (1, 1, 67)):
        ours.states.restore({0: snapshot})
        steps.computed[0] = begin
        (again,) = steps.run({0: end - begin})
        assert_near(again, expected[begin:end])


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
def test_weights_in_bfloat16_are_near_those_in_float32(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path / "model")
    (prompt,) = make_prompts(70)
    cpu = torch.device("cpu")
    exact, rounded = (
        Steps(load_model(folder, dtype, cpu, 96), [prompt]).run({0: 70})[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    errors = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < errors.median() < 0.05


def test_experts_in_one_tensor_are_those_of_one_each_on_ranks_too(tmp_path: Path) -> None:
    folder = written("qwen3_5_moe", tmp_path / "model")
    (prompt,) = make_prompts(20)
    cpu = torch.device("cpu")

    def logits(group: Group = ALONE) -> torch.Tensor:
        return Steps(load_model(folder, torch.float32, cpu, 96, group), [prompt]).run({0: 20})[0]

    wanted = logits()
    stack_experts(folder)
    assert torch.equal(logits(), wanted)
    for found in on_ranks(2, logits):
        assert_near(found, wanted)
