"""Rows that ask for more than a token: graphs against the same kernels launched one by one."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu.test_cuda_runner import SHAPE, Client, make_prompt, make_runner
from tests.gpu.test_step_graphs import CONFIG, DRAWN, FILTERED, GREEDY, MAX_NUM_SEQS
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.spelling import DIGITS, EOS, make_tokenizer
from worker_svc.protocol.step import (
    ROW_DEAD_END,
    ROW_NOT_FINITE,
    ROW_OK,
    RowSampling,
    StepOutput,
)
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.sampling.mask_filling import MaskFiller

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

POISON = 99  # a token
PENALIZED = RowSampling(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2)
KINDS = {
    "log probabilities": RowSampling(num_top_logprobs=3),
    "penalties": PENALIZED,
    "grammars": RowSampling(temperature=1.0, seed=6, grammar=DIGITS),
    "filters": dataclasses.replace(FILTERED, num_top_logprobs=20, frequency_penalty=0.5),
    "all": RowSampling(
        num_top_logprobs=5, presence_penalty=0.7, temperature=1.1, seed=8, grammar=DIGITS,
        logit_bias=((20, 1.5),), min_tokens=9, stop_token_ids=(2,),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CudaRunner:
    folder: Path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(folder, (Qwen3Config, Qwen3ForCausalLM), SHAPE | {"eos_token_id": EOS})
    make_tokenizer().save(str(folder / "tokenizer.json"))
    made = make_runner(folder, CONFIG)
    assert isinstance(made, CudaRunner)
    return made


def played(runner: CudaRunner, asking: dict[int, RowSampling], num_rows: int) -> list[StepOutput]:
    """Prompts of many lengths, then steps that decode, two in flight."""
    client, found = Client(runner), []
    collect = client.collect

    def keeping() -> StepOutput:
        found.append(collect())
        return found[-1]

    client.collect = keeping  # type: ignore[method-assign]
    prompts = {slot: make_prompt(2 + slot * 7 % 13, seed=slot) for slot in range(num_rows)}
    for some in np.array_split(np.arange(num_rows), max(1, num_rows // 30)):
        part = {int(slot): len(prompts[int(slot)]) for slot in some}
        new = tuple(client.enter(slot, prompts[slot], asking.get(slot, DRAWN)) for slot in part)
        client.launch(part, new_sequences=new)
    for _ in range(3):
        client.launch(dict.fromkeys(prompts, 1))
    client.drain()
    return found


def values(output: StepOutput) -> list[Any]:
    status = output.row_status
    parts = [output.token_ids.tolist(), None if status is None else status.tolist(), output.error]
    if output.logprobs is not None:
        columns = dataclasses.asdict(output.logprobs)
        parts += [np.asarray(column).tolist() for column in columns.values()]
    return parts


def check(runner: CudaRunner, asking: dict[int, RowSampling], num_rows: int) -> int:
    """Graphs give what they give launched one by one; returns how many steps had them."""
    replays = 0
    sample = runner._asked_graphs.sample

    def counting(*arguments: Any) -> Any:
        nonlocal replays
        replays += 1
        return sample(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._asked_graphs, "sample", counting)
        by_graph = played(runner, asking, num_rows)
        number = replays
        patch.setattr(runner._asked_graphs, "hold", lambda step, sampling: False)
        by_kernels = played(runner, asking, num_rows)
    assert replays == number
    assert [values(one) for one in by_graph] == [values(one) for one in by_kernels]
    assert all(one.row_status is None and not one.error for one in by_graph)
    return number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_asking", [1, 4, 5, 16, 17, 64])
def test_around_every_size_answers_are_those_of_single_kernels(
    runner: CudaRunner, num_asking: int, kind: str
) -> None:
    # Every second row asks, and from the last one on.
    slots = [slot for first in (1, 0) for slot in range(first, MAX_NUM_SEQS, 2)][:num_asking]
    assert check(runner, dict.fromkeys(slots, KINDS[kind]), MAX_NUM_SEQS) >= 3


@pytest.mark.parametrize("kind", ["grammars", "all"])
def test_guessed_tokens_are_those_of_whole_masks(
    runner: CudaRunner, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskFiller, "wants_guesses", True)  # single kernels bring none
    assert check(runner, dict.fromkeys(range(0, 60, 2), KINDS[kind]), MAX_NUM_SEQS) >= 3


def test_rows_of_every_kind_share_a_step(runner: CudaRunner) -> None:
    every = [*KINDS.values(), GREEDY, PENALIZED]
    asking = {slot: every[slot % len(every)] for slot in range(33)}
    assert check(runner, asking, 40) >= 3


@pytest.mark.parametrize("kind", ["log probabilities", "penalties"])
def test_more_rows_than_graphs_hold_are_served_one_by_one(runner: CudaRunner, kind: str) -> None:
    asking = dict.fromkeys(range(MAX_NUM_SEQS), KINDS[kind])
    assert check(runner, asking, MAX_NUM_SEQS) == 2  # the prompts, which are fewer


def test_a_dead_end_and_logits_that_are_not_finite_end_their_rows_alone(
    runner: CudaRunner,
) -> None:
    prompts = {slot: [5, 6, 7 + slot] for slot in range(6)}
    prompts[2] = prompts[3] = [5, POISON, 7]
    asking = {
        1: RowSampling(grammar=DIGITS, allowed_token_ids=(3,)),
        2: PENALIZED,
        4: KINDS["all"],
        5: KINDS["log probabilities"],
    }
    table = runner._model._embedding.table
    kept = table[POISON].clone()
    table[POISON] = float("nan")
    try:
        client = Client(runner)
        new = tuple(client.enter(n, prompt, asking.get(n, DRAWN)) for n, prompt in prompts.items())
        client.launch({slot: len(prompt) for slot, prompt in prompts.items()}, new_sequences=new)
        output = client.collect()
    finally:
        table[POISON] = kept
    assert output.row_status is not None
    bad = ROW_NOT_FINITE
    assert output.row_status.tolist() == [ROW_OK, ROW_DEAD_END, bad, bad, ROW_OK, ROW_OK]
    assert output.logprobs is not None and np.isfinite(output.logprobs.logprobs).all()
