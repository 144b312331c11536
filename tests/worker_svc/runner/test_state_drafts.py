"""Drafts of sequences with states: refused ones leave the states of those that were accepted."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker_svc.runner.interpreted import (
    BLOCKS_PER_SEQ,
    composed_runner,
    eager_runner,
    needs_interpreter,
)
from tests.worker_svc.runner.test_verified_drafts import HOW, PROMPTS, mixed
from tests.worker_svc.runner.verifying import Verifying, check_same, without_drafts
from tests.worker_svc.transformers_models.families import NATIVE_HYBRIDS, write
from worker_svc.protocol.step import RowSampling
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.states.slots import SlotStates

GREEDY = {slot: RowSampling(num_top_logprobs=0) for slot in PROMPTS}


@pytest.fixture(params=NATIVE_HYBRIDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(request.param, tmp_path / request.param)


def states_of(runner: ModelRunner, slot: int) -> list[torch.Tensor]:
    """All states of a slot as they count now."""
    states = runner._model.states
    assert isinstance(states, SlotStates)
    found = states.read(torch.tensor([slot]), torch.zeros(1, dtype=torch.bool))
    return list(found.values())


def check_states(found: ModelRunner, wanted: ModelRunner, slots: Sequence[int]) -> None:
    """Compares states up to rounding: products of other rows in a step round otherwise."""
    for slot in slots:
        for one, other in zip(states_of(found, slot), states_of(wanted, slot), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_tokens_with_right_and_wrong_drafts_are_those_without(folder: Path) -> None:
    expected = without_drafts(eager_runner(folder), BLOCKS_PER_SEQ, PROMPTS, HOW, 14)
    found = mixed(eager_runner(folder), expected)
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(4)] == [12, 10, 8, 5]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
@needs_interpreter[0]
@needs_interpreter[1]
def test_tokens_with_drafts_by_kernels_are_those_without(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name, tmp_path / name, {"head_dim": 16, "hidden_size": 64})
    expected = without_drafts(eager_runner(folder), BLOCKS_PER_SEQ, PROMPTS, HOW, 14)
    check_same(mixed(composed_runner(folder, monkeypatch), expected), expected)


@pytest.mark.parametrize("right", [0, 1, 4])
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_states_after_drafts_are_those_of_single_tokens(
    tmp_path: Path, right: int, wrong: int
) -> None:
    folder = write("qwen3_5", tmp_path / "qwen3_5")
    alone, drafting = (eager_runner(folder) for _ in range(2))
    expected = without_drafts(alone, BLOCKS_PER_SEQ, PROMPTS, GREEDY, 12)
    client = Verifying(drafting, BLOCKS_PER_SEQ, expected)
    new = [client.enter(slot, prompt, GREEDY[slot]) for slot, prompt in PROMPTS.items()]
    client.step({slot: len(prompt) for slot, prompt in PROMPTS.items()}, new=new)
    # The other rows go on with a token each; the drafts of one are as the test says.
    client.decode([0, 1, 2, 3], {2: (right, wrong)} if right + wrong else None)
    client.drain()
    # What each row would have come to by single tokens.
    plain = eager_runner(folder)
    others = [slot for slot in PROMPTS if slot != 2]
    without_drafts(plain, BLOCKS_PER_SEQ, PROMPTS, GREEDY, 2)
    check_states(drafting, plain, others)
    without_drafts(plain, BLOCKS_PER_SEQ, PROMPTS, GREEDY, 2 + right)
    check_states(drafting, plain, [2])


def test_a_failed_verification_leaves_states_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = eager_runner(write("lfm2", tmp_path / "lfm2"))
    prompts, how = {1: PROMPTS[1]}, {1: GREEDY[1]}
    expected = without_drafts(eager_runner(tmp_path / "lfm2"), BLOCKS_PER_SEQ, prompts, how, 8)
    client = Verifying(runner, BLOCKS_PER_SEQ, expected)
    client.step({1: 4}, new=[client.enter(1, PROMPTS[1], GREEDY[1])])
    client.drain()
    before = [state.clone() for state in states_of(runner, 1)]

    def broken(*arguments: object) -> None:
        raise RuntimeError("by the test")

    with monkeypatch.context() as patch:
        patch.setattr(type(runner.state), "write_known", broken)  # after the drafts are verified
        with pytest.raises(RuntimeError, match="by the test"):
            client.decode([1], {1: (2, 1)})
    for found, wanted in zip(states_of(runner, 1), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    client.decode([1], {1: (2, 1)})
    client.decode([1])
    check_same(client.drain(), expected)
