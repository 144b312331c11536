"""Steps that verify drafts, in graphs and kernel by kernel, against steps without, in float32."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu import test_cuda_runner
from tests.gpu.test_cuda_runner import BLOCKS_PER_SEQ, SHAPE, make_prompt, make_runner
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.runner.verifying import Told, Verifying, check_same, without_drafts
from worker_svc.protocol.step import RowSampling
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MAX_NUM_SEQS = 264  # so many positions have 33 rows of 7 drafts
CONFIG = dataclasses.replace(
    test_cuda_runner.CONFIG,
    num_kv_blocks=1 + MAX_NUM_SEQS * BLOCKS_PER_SEQ,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=600,
)
NUM_TOKENS = 44
HOW = (
    RowSampling(),
    RowSampling(temperature=1.0, top_p=0.9, seed=4),
    RowSampling(temperature=1.3, seed=5),
    RowSampling(temperature=0.9, top_k=20, min_p=0.02, seed=6),
)
ASKING = (
    RowSampling(num_top_logprobs=3),
    RowSampling(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
    RowSampling(temperature=1.0, seed=3, logit_bias=((7, 4.0), (9, -3.0)), num_top_logprobs=0),
    RowSampling(min_tokens=50, stop_token_ids=(3, 4, 5), bad_words_token_ids=((8,), (9, 10))),
    RowSampling(temperature=0.9, top_k=5, seed=4, allowed_token_ids=(10, 11, 12, 13)),
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CudaRunner:
    folder: Path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(folder, (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    made = make_runner(folder, CONFIG)
    assert isinstance(made, CudaRunner) and made.verifies_drafts
    return made


def prompts_of(num_rows: int) -> dict[int, list[int]]:
    return {slot: make_prompt(3 + slot % 29, seed=slot) for slot in range(num_rows)}


def expected_of(
    runner: ModelRunner, num_rows: int, how: tuple[RowSampling, ...]
) -> tuple[dict[int, RowSampling], Told]:
    ways = {slot: how[slot % len(how)] for slot in range(num_rows)}
    prompts = prompts_of(num_rows)
    return ways, without_drafts(runner, BLOCKS_PER_SEQ, prompts, ways, NUM_TOKENS)


def drafting(runner: ModelRunner, ways: dict[int, RowSampling], most: int, expected: Told) -> Told:
    """Rows with right, wrong, both and no drafts; then plain steps, and drafts again."""
    client = Verifying(runner, BLOCKS_PER_SEQ, expected)
    prompts = prompts_of(len(ways))
    new = [client.enter(slot, prompt, ways[slot]) for slot, prompt in prompts.items()]
    client.step({slot: len(prompt) for slot, prompt in prompts.items()}, new=new)
    slots = list(ways)
    for number in range(3):
        right = [(slot + number) % (most + 1) for slot in slots]
        client.decode(slots, {slot: (right[slot], most - right[slot]) for slot in slots})
        client.decode(slots)
        if number < 2:
            client.decode(slots[::-1])
    some = dict.fromkeys(slots[::3], (most, 0))
    client.decode(slots, some)
    client.decode(slots)
    return client.drain()


@pytest.mark.parametrize("how", [HOW, ASKING, (*HOW, *ASKING)], ids=["plain", "asking", "both"])
@pytest.mark.parametrize("num_rows", [1, 3, 33])
@pytest.mark.parametrize("most", [1, 2, 4, 7])
def test_drafts_change_no_token(
    runner: CudaRunner, num_rows: int, most: int, how: tuple[RowSampling, ...]
) -> None:
    ways, expected = expected_of(runner, num_rows, how)
    num_mapped = 0
    begin = runner._step_graphs.begin

    def counting(step: object, **how: bool) -> None:
        nonlocal num_mapped
        num_mapped += 1
        begin(step, **how)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._step_graphs, "begin", counting)
        in_graphs = drafting(runner, ways, most, expected)
        assert num_mapped >= 5  # the prompts' step, and those with drafts
        patch.setattr(runner._step_graphs, "map", lambda rows: None)
        by_kernels = drafting(runner, ways, most, expected)
    for found in (in_graphs, by_kernels):
        check_same(found, expected)
    assert in_graphs.hashes == by_kernels.hashes
    assert len({token for tokens in expected.tokens.values() for token in tokens}) > 1


def test_prompts_enter_in_steps_that_verify(runner: CudaRunner) -> None:
    ways, expected = expected_of(runner, 9, (*HOW, *ASKING))
    client = Verifying(runner, BLOCKS_PER_SEQ, expected)
    prompts = prompts_of(9)
    first = {slot: prompts[slot] for slot in range(4)}
    new = [client.enter(slot, prompt, ways[slot]) for slot, prompt in first.items()]
    client.step({slot: len(prompt) for slot, prompt in first.items()}, new=new)
    for slot in range(4, 9):
        drafted = {slot % 4: (2, 1), (slot + 1) % 4: (0, 2), (slot + 2) % 4: (3, 0)}
        entering = client.enter(slot, prompts[slot], ways[slot])
        rows = {2: 1, slot: 2, 0: 1, 1: 1, 3: 1}
        client.step(rows, drafted, new=[entering], unfinished=[slot])
        rest = len(prompts[slot]) - 2
        client.step({3: 1, slot: rest, 0: 1}, {3: (1, 1)} if slot % 2 else None)
    client.decode(range(9))
    check_same(client.drain(), expected)


def test_a_verification_that_fails_leaves_no_trace(runner: CudaRunner) -> None:
    ways, expected = expected_of(runner, 3, HOW)
    client = Verifying(runner, BLOCKS_PER_SEQ, expected)
    prompts = prompts_of(3)
    new = [client.enter(slot, prompt, ways[slot]) for slot, prompt in prompts.items()]
    client.step({slot: len(prompt) for slot, prompt in prompts.items()}, new=new)
    client.decode([0, 1, 2])
    client.drain()

    def broken(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.slots, "advance", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            client.decode([2, 1, 0], {0: (3, 1), 2: (1, 0)})
    client.decode([2, 1, 0], {0: (3, 1), 2: (1, 0)})
    client.decode([0, 1, 2])
    check_same(client.drain(), expected)
