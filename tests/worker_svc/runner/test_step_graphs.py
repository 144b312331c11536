"""Repetitions by step graphs, interpreted: maps, tiles and both halves of a step."""

import dataclasses
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.models.test_gemma import CHECKPOINTS as GEMMAS
from tests.worker_svc.models.test_gemma import SIZES
from tests.worker_svc.models.test_models import SHAPE
from tests.worker_svc.models.test_windows import CHECKPOINTS as WINDOWS
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.runner.interpreted import (
    BLOCKS_PER_SEQ,
    CPU,
    LIMITS,
    eager_runner,
    interpreted_runner,
    needs_interpreter,
)
from tests.worker_svc.spelling import DIGITS, EOS, make_tokenizer
from wire.grammar import read_vocabulary
from worker_svc.protocol.step import NewSequence, RowSampling, SaveRequest, StepInput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.sampling.grammars import Grammars
from worker_svc.sampling.mask_filling import MaskFiller

pytestmark = needs_interpreter

GREEDY = RowSampling()
DRAWN = RowSampling(temperature=1.2, seed=4)
FILTERED = RowSampling(temperature=1.1, top_k=7, seed=2)
ASKING = RowSampling(presence_penalty=0.9, logit_bias=((5, 2.0),), num_top_logprobs=2)
NAMING = RowSampling(num_top_logprobs=0, logprob_token_ids=(7, 50, 3))


def enter(slot: int, prompt: list[int], sampling: RowSampling = GREEDY) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=str(slot),
        token_ids=np.array(prompt, dtype=np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.arange(BLOCKS_PER_SEQ, dtype=np.int32) + 1 + slot * BLOCKS_PER_SEQ,
        sampling=sampling,
    )


def step_of(
    step_id: int,
    rows: dict[int, int],
    new: tuple[NewSequence, ...],
    freed: tuple[int, ...] = (),
    saves: tuple[SaveRequest, ...] = (),
) -> StepInput:
    """A step of these numbers of tokens by slot; the first one resets the worker."""
    return StepInput(
        step_id=step_id,
        reset=step_id == 1,
        freed_slots=np.array(freed, dtype=np.int64),
        new_sequences=new,
        slots=np.array(list(rows)),
        num_scheduled=np.array(list(rows.values())),
        state_saves=saves,
    )


def play(runner: ModelRunner, *steps: tuple[Any, ...]) -> list:
    """The tokens of each step, and the log probabilities of those that have any."""
    found = []
    for index, step in enumerate(steps):
        output = runner.execute(step_of(1 + index, *step))
        assert not output.error, output.error
        tops = None if output.logprobs is None else output.logprobs.top_token_ids.tolist()
        found.append((output.token_ids.tolist(), tops))
    return found


def test_prompts_chunks_and_decodes_give_the_tokens_of_the_eager_runner(
    eager: ModelRunner, interpreted: ModelRunner
) -> None:
    first, second, third = (make_prompt(n, seed=n) for n in (13, 40, 3))
    # Another prompt that begins as the second one, whose blocks it reads.
    cached = dataclasses.replace(enter(5, second[:24] + first, FILTERED), num_computed_tokens=24)
    blocks = np.concatenate([1 + 4 * BLOCKS_PER_SEQ + np.arange(3), cached.block_ids[3:]])
    cached = dataclasses.replace(cached, block_ids=blocks.astype(np.int32))
    steps = [
        ({1: 13, 4: 21}, (enter(1, first), enter(4, second, DRAWN))),
        ({1: 1, 4: 16, 0: 3}, (enter(0, third),)),
        ({4: 3, 0: 1, 1: 1}, ()),
        ({0: 1, 5: 13, 1: 1, 4: 1}, (cached,)),
        ({0: 1, 1: 1, 4: 1, 5: 1}, ()),
    ]
    assert play(interpreted, *steps) == play(eager, *steps)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2"])
def test_layers_of_several_kinds_give_the_tokens_of_the_eager_runner(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_programs: None
) -> None:
    """Windows, softcaps and norms of outputs, in steps and parts of steps as graphs have them."""
    family, changes = (WINDOWS | GEMMAS)[name]
    sizes = {"vocab_size": LIMITS.vocab_size, "num_key_value_heads": 2}
    sizes |= SIZES if name in GEMMAS else {}
    save_random_model(tmp_path, family, SHAPE | sizes | changes)
    eager = eager_runner(tmp_path)
    runner = interpreted_runner(tmp_path, monkeypatch)
    first, second, third = (make_prompt(n, seed=n) for n in (13, 40, 3))
    steps = [
        ({1: 13, 4: 21}, (enter(1, first), enter(4, second))),
        ({1: 1, 4: 16, 0: 3}, (enter(0, third),)),
        ({4: 3, 0: 1, 1: 1}, ()),
        ({0: 1, 1: 1, 4: 1}, ()),
    ]
    assert play(runner, *steps) == play(eager, *steps)


def counted(runner: ModelRunner) -> list[int]:
    """Notes how many rows sample in each step that graphs of requests serve."""
    found: list[int] = []
    sample = runner._asked_graphs.sample

    def counting(step, *rest):
        found.append(step.num_sampled)
        return sample(step, *rest)

    runner._asked_graphs.sample = counting
    return found


def test_rows_that_ask_for_more_give_the_tokens_of_the_eager_runner(
    eager: ModelRunner, interpreted: ModelRunner
) -> None:
    # The longest row is first in a graph, so rows lie in another order there.
    new = (enter(2, make_prompt(9), ASKING), enter(3, make_prompt(17, seed=2), FILTERED))
    naming = enter(0, make_prompt(5, seed=3), NAMING)
    steps = [
        ({2: 9, 3: 17}, new),
        ({3: 1, 2: 1}, ()),
        ({2: 1, 3: 1, 0: 5}, (naming,)),  # no graph looks up what a row names
        ({3: 1, 2: 1}, ()),
    ]
    by_graph = counted(interpreted)
    found = play(interpreted, *steps)
    assert found == play(eager, *steps)
    assert found[2][1][1] == list(NAMING.logprob_token_ids)
    assert by_graph == [2, 2, 2]


def test_rows_with_grammars_and_more_give_the_tokens_of_the_eager_runner(
    eager: ModelRunner, interpreted: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = dataclasses.replace(ASKING, grammar=DIGITS, temperature=1.0, seed=3)
    new = (
        enter(2, make_prompt(5), RowSampling(grammar=DIGITS)),
        enter(3, make_prompt(17, seed=2), DRAWN),
        enter(0, make_prompt(9, seed=3), everything),
    )
    naming = enter(1, make_prompt(12, seed=4), NAMING)
    lengths = {2: 5, 3: 17, 0: 9}
    decode = (dict.fromkeys(lengths, 1), ())
    steps = [(lengths, new), decode, decode, ({2: 1, 1: 12, 3: 1, 0: 1}, (naming,))]
    definition = make_tokenizer().to_str()
    for runner in (eager, interpreted):
        runner.state.grammars = Grammars(128, lambda: read_vocabulary(definition, 128, [EOS]))
    interpreted.state.grammars.fill_for(CPU, LIMITS.max_num_seqs)
    # Rows guess their tokens in every second step, also in the last, which brings no guesses.
    turns = cycle([False, True])
    monkeypatch.setattr(MaskFiller, "wants_guesses", property(lambda masks: next(turns)))
    by_graph = counted(interpreted)
    found = play(interpreted, *steps)
    assert found == play(eager, *steps)
    assert by_graph == [3, 3, 3]
    spelled = make_tokenizer().decode([tokens[0] for tokens, _ in found])
    assert spelled.isdigit()


def test_larger_steps_are_launched_one_by_one(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, few_programs: None
) -> None:
    monkeypatch.setattr("worker_svc.runner.graphs.asked_graphs.MOST_ROWS", 2)
    runner = interpreted_runner(llama_folder, monkeypatch)
    asked, steps = runner._asked_graphs, runner._step_graphs
    assert asked.row_sizes == (1, 2) and steps.row_sizes == (1, 2, 4, LIMITS.max_num_seqs)
    rows = [enter(slot, make_prompt(4, seed=slot), ASKING) for slot in range(3)]
    by_graph = counted(runner)
    play(runner, ({0: 4}, (rows[0],)), ({0: 1, 1: 4, 2: 4}, tuple(rows[1:])), ({0: 1, 1: 1}, ()))
    assert by_graph == [1, 2]
    steps._logits.clear()  # as where only the largest graphs are captured
    asked._widen(2)
