"""A draft model in graphs: the tokens of steps without, in float32, whatever it drafts."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu.test_cuda_runner import BLOCKS_PER_SEQ, SHAPE, make_runner
from tests.gpu.test_drafts import ASKING, CONFIG, HOW, NUM_TOKENS, expected_of, prompts_of
from tests.worker_svc.random_models import save_disturbed, save_random_model
from tests.worker_svc.runner.verifying import Told, Verifying, check_same
from worker_svc.protocol.step import RowSampling
from worker_svc.runner.cuda_draft_model import CudaDraftModel
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NOISE = 0.03  # a tenth of the weights' spread
BOTH = (*HOW, *ASKING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(made, (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    return made


def drafting(folder: Path, draft: Path) -> ModelRunner:
    runner = make_runner(folder, dataclasses.replace(CONFIG, draft_model=draft))
    assert isinstance(runner.draft_model, CudaDraftModel)
    return runner


@pytest.fixture(scope="module")
def same(folder: Path) -> ModelRunner:
    return drafting(folder, folder)


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return drafting(
        folder, save_disturbed(folder, tmp_path_factory.mktemp("models") / "other", NOISE)
    )


def told(runner: ModelRunner, ways: dict[int, RowSampling], most: int) -> tuple[Told, int]:
    """Rows of every number of drafts, plain steps, some rows alone; and the number of drafts."""
    client = Verifying(runner, BLOCKS_PER_SEQ)
    prompts, num_drafted = prompts_of(len(ways)), 0
    new = [client.enter(slot, prompt, ways[slot]) for slot, prompt in prompts.items()]
    client.step({slot: len(prompt) for slot, prompt in prompts.items()}, new=new)
    slots = list(ways)
    for number in range(3):
        lengths = {slot: (slot + number) % (most + 1) for slot in slots}
        if any(lengths.values()):
            client.drafted_there(slots, lengths)
            num_drafted += sum(lengths.values())
        client.decode(slots if number else slots[::-1])
    for some in (slots[::3], slots):
        client.drafted_there(some, dict.fromkeys(some, most))
        num_drafted += most * len(some)
    client.decode(slots)
    return client.drain(), num_drafted


def num_plain(num_rows: int, most: int) -> int:
    """Tokens of the same steps without a draft that comes true."""
    num_all = sum(any((slot + n) % (most + 1) for slot in range(num_rows)) for n in range(3))
    return num_rows * (1 + 3 + num_all + 2) + len(range(0, num_rows, 3))


@pytest.mark.parametrize("how", [HOW, ASKING, BOTH], ids=["plain", "asking", "both"])
@pytest.mark.parametrize("num_rows", [1, 3, 33])
@pytest.mark.parametrize("most", [1, 2, 4, 7])
def test_the_same_model_is_right_and_another_changes_no_token(
    same: ModelRunner, other: ModelRunner, most: int, num_rows: int, how: tuple[RowSampling, ...]
) -> None:
    ways, expected = expected_of(same, num_rows, how)
    found, num_drafted = told(same, ways, most)
    check_same(found, expected)
    assert sum(map(len, found.tokens.values())) == num_plain(num_rows, most) + num_drafted
    disturbed, _ = told(other, ways, most)
    check_same(disturbed, expected)
    num_right = sum(map(len, disturbed.tokens.values())) - num_plain(num_rows, most)
    assert 0 <= num_right <= num_drafted
    if num_rows == 33:
        assert 0 < num_right < num_drafted


def test_a_draft_that_fails_leaves_no_trace(same: ModelRunner) -> None:
    ways, expected = expected_of(same, 3, HOW)
    client = Verifying(same, BLOCKS_PER_SEQ)
    prompts = prompts_of(3)
    new = [client.enter(slot, prompt, ways[slot]) for slot, prompt in prompts.items()]
    client.step({slot: len(prompt) for slot, prompt in prompts.items()}, new=new)
    client.drafted_there([0, 1, 2], {0: 2, 2: 1})

    def broken(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same.draft_model, "_sample", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            client.drafted_there([2, 1, 0], {0: 3, 2: 4})
    client.drafted_there([2, 1, 0], {0: 3, 2: 4})
    found = client.drain()
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(3)] == [8, 3, 8]
    assert NUM_TOKENS >= 8
