"""Grammars on a GPU, where a step is launched before the previous token is known."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from tests.gpu.test_cuda_runner import (
    CONFIG,
    GREEDY,
    Checkpoint,
    Client,
    checkpoint,
    generate,
    make_prompt,
    make_runner,
)
from tests.worker_svc.spelling import DIGITS, EOS, SUMS, make_tokenizer
from worker_svc.protocol.step import ROW_DEAD_END, RowSampling
from worker_svc.runner.model_runner import NO_TOKEN_LEFT, ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

__all__ = ["checkpoint"]  # a fixture

PROMPTS = {slot: make_prompt(5 + slot, seed=slot) for slot in (0, 3, 5)}
SAMPLINGS = {
    0: RowSampling(temperature=1.0, seed=1, grammar=DIGITS),
    3: GREEDY,
    5: RowSampling(temperature=1.0, seed=2, grammar=SUMS),
}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def spelling_runner(
    checkpoint: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> ModelRunner:
    """A runner of the Llama, after its warm-up, in a folder with a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("models") / "spelling"
    shutil.copytree(checkpoint("llama").folder, folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return make_runner(folder, CONFIG)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer()


def until_end(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(EOS)] if EOS in token_ids else token_ids


def test_outputs_follow_their_grammars_beside_rows_that_have_none(
    checkpoint: Callable[[str], Checkpoint],
    spelling_runner: ModelRunner,
    tokenizer: tokenizers.Tokenizer,
) -> None:
    tokens = generate(spelling_runner, PROMPTS, NUM_TOKENS, SAMPLINGS)
    assert tokens[3] == checkpoint("llama").greedy(PROMPTS[3], NUM_TOKENS)
    assert re.fullmatch("[0-9]{3,9}", tokenizer.decode(until_end(tokens[0])))
    assert re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})*\+?", tokenizer.decode(until_end(tokens[5])))


def test_waiting_for_every_step_changes_nothing(spelling_runner: ModelRunner) -> None:
    ahead = generate(spelling_runner, PROMPTS, NUM_TOKENS, SAMPLINGS)
    client = Client(spelling_runner)
    new = tuple(client.enter(slot, PROMPTS[slot], SAMPLINGS[slot]) for slot in PROMPTS)
    client.launch({slot: len(prompt) for slot, prompt in PROMPTS.items()}, new_sequences=new)
    client.drain()
    for _ in range(NUM_TOKENS - 1):
        client.launch(dict.fromkeys(PROMPTS, 1))
        client.drain()
    for slot in PROMPTS:
        assert until_end(client.tokens[slot]) == until_end(ahead[slot])


def test_a_resumed_sequence_goes_on_where_it_was(spelling_runner: ModelRunner) -> None:
    whole = generate(spelling_runner, PROMPTS, NUM_TOKENS, SAMPLINGS)[5]
    known = whole[:4]
    client = Client(spelling_runner)
    entering = client.enter(5, PROMPTS[5] + known, SAMPLINGS[5])
    resumed = replace(entering, num_prompt_tokens=len(PROMPTS[5]))
    client.launch({5: len(resumed.token_ids)}, new_sequences=(resumed,))
    for _ in range(NUM_TOKENS - 5):
        client.launch({5: 1})
    client.drain()
    assert until_end(known + client.tokens[5]) == until_end(whole)


def test_a_dead_end_is_told_apart_from_logits_that_are_not_finite(
    spelling_runner: ModelRunner,
) -> None:
    client = Client(spelling_runner)
    samplings = {1: SAMPLINGS[0], 2: RowSampling(grammar=DIGITS, allowed_token_ids=(EOS,))}
    samplings[4] = RowSampling(grammar="start: nothing")
    new = tuple(client.enter(slot, [5, 6, 7], how) for slot, how in samplings.items())
    client.launch(dict.fromkeys(samplings, 3), new_sequences=new)
    output = client.collect()
    assert output.row_status is not None
    assert output.row_status.tolist() == [0, ROW_DEAD_END, ROW_DEAD_END]
    assert output.row_errors[1] == NO_TOKEN_LEFT
    assert 'unknown name: "nothing"' in output.row_errors[2]
    assert np.isin(output.token_ids[1:], 0).all()
