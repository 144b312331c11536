"""A draft model as CUDA launches it, interpreted: what it drafts, and what is sampled after it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.random_models import save_disturbed
from tests.worker_svc.runner.interpreted import (
    BLOCKS_PER_SEQ,
    LIMITS,
    draft_with,
    needs_interpreter,
)
from tests.worker_svc.runner.verifying import Told, Verifying, check_same, without_drafts
from worker_svc.protocol.step import RowSampling
from worker_svc.runner.cuda_draft_model import CudaDraftModel
from worker_svc.runner.model_runner import ModelRunner

pytestmark = needs_interpreter

PROMPTS = {slot: make_prompt(length, seed=slot) for slot, length in enumerate((5, 9, 6))}
HOW = {
    0: RowSampling(),
    1: RowSampling(temperature=1.2, top_p=0.9, seed=4),
    2: RowSampling(temperature=1.0, seed=8),
}
NOISE = 0.03  # a tenth of the weights' spread
ASKING = {
    0: RowSampling(num_top_logprobs=2),
    1: HOW[1],
    2: RowSampling(
        temperature=0.9, seed=3, presence_penalty=1.5, repetition_penalty=1.3, min_tokens=9,
        stop_token_ids=(3, 4, 5), bad_words_token_ids=((8, 9), (10,)), logit_bias=((11, 2.0),),
    ),
}  # fmt: skip


@pytest.fixture
def drafting(
    interpreted: ModelRunner, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ModelRunner:
    """The runner with its own model as the draft model, which is right whatever is asked."""
    draft_with(interpreted, llama_folder, monkeypatch)
    return interpreted


def counting(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts what the draft model replays, by kind."""
    draft = runner.draft_model
    assert isinstance(draft, CudaDraftModel)
    counts = {"replay": 0, "begin": 0}
    replay, begin = draft._decode_graphs.replay, draft._step_graphs.begin

    def counted(name: str, work: Callable[..., Any], *arguments: object) -> Any:
        counts[name] += 1
        return work(*arguments)

    monkeypatch.setattr(draft._decode_graphs, "replay", partial(counted, "replay", replay))
    monkeypatch.setattr(draft._step_graphs, "begin", partial(counted, "begin", begin))
    return counts


def told(runner: ModelRunner, how: dict[int, RowSampling]) -> Told:
    """Three rows: drafts of every length, of some rows and of all, and steps without between."""
    client = Verifying(runner, BLOCKS_PER_SEQ)
    new = [client.enter(slot, prompt, how[slot]) for slot, prompt in PROMPTS.items()]
    client.step({slot: len(prompt) for slot, prompt in PROMPTS.items()}, new=new)
    client.drafted_there([1, 0, 2], {0: 2, 1: 1})  # both read their prompts first
    client.drafted_there([0, 1, 2], {})
    client.drafted_there([2, 0, 1], {2: 2, 0: 1, 1: 1})  # and now three tokens and two
    return client.drain()


@pytest.mark.parametrize("how", [HOW, ASKING], ids=["plain", "asking"])
def test_the_same_model_is_always_right(
    eager: ModelRunner,
    drafting: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[int, RowSampling],
) -> None:
    counts = counting(drafting, monkeypatch)
    expected = without_drafts(eager, BLOCKS_PER_SEQ, PROMPTS, how, 9)
    found = told(drafting, how)
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(3)] == [7, 6, 6]
    # In each step with drafts a row reads more than a token before the first.
    assert counts == ({"replay": 2, "begin": 2} if how is HOW else {"replay": 1, "begin": 3})


def test_what_no_graph_holds_is_drafted_by_kernels(
    eager: ModelRunner, drafting: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_drafts(eager, BLOCKS_PER_SEQ, PROMPTS, ASKING, 9)
    draft = drafting.draft_model
    assert isinstance(draft, CudaDraftModel)
    monkeypatch.setattr(draft._step_graphs, "map", lambda rows: None)
    found = told(drafting, ASKING)
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(3)] == [7, 6, 6]


def test_long_prompts_are_read_in_pieces(
    eager: ModelRunner, drafting: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {slot: make_prompt(11, seed=slot) for slot in range(2)}
    how = {0: HOW[0], 1: HOW[2]}
    draft = drafting.draft_model
    assert draft is not None
    monkeypatch.setattr(draft, "limits", replace(LIMITS, max_num_batched_tokens=16))
    expected = without_drafts(eager, BLOCKS_PER_SEQ, prompts, how, 6)
    client = Verifying(drafting, BLOCKS_PER_SEQ)
    for slot, prompt in prompts.items():
        client.step({slot: len(prompt)}, new=[client.enter(slot, prompt, how[slot])])
    counts = counting(drafting, monkeypatch)
    client.drafted_there([0, 1], {0: 2, 1: 2})
    client.drafted_there([0, 1], {0: 1, 1: 1})
    found = client.drain()
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(2)] == [6, 6]
    assert counts == {"replay": 1, "begin": 3}


def test_another_model_changes_no_token(
    eager: ModelRunner,
    interpreted: ModelRunner,
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = save_disturbed(llama_folder, tmp_path / "other", NOISE)
    draft_with(interpreted, other, monkeypatch)
    expected = without_drafts(eager, BLOCKS_PER_SEQ, PROMPTS, HOW, 9)
    found = told(interpreted, HOW)
    check_same(found, expected)
    num_found = sum(map(len, found.tokens.values()))
    assert 3 * 4 < num_found < 7 + 6 + 6  # some drafts came true, and some did not


def test_a_failed_step_leaves_no_trace_of_its_drafts(
    eager: ModelRunner, drafting: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_drafts(eager, BLOCKS_PER_SEQ, PROMPTS, HOW, 9)
    client = Verifying(drafting, BLOCKS_PER_SEQ)
    new = [client.enter(slot, prompt, HOW[slot]) for slot, prompt in PROMPTS.items()]
    client.step({slot: len(prompt) for slot, prompt in PROMPTS.items()}, new=new)
    client.drafted_there([1, 0, 2], {0: 2, 1: 1})
    slots = drafting.slots  # type: ignore[attr-defined]

    def broken(*arguments: object) -> None:
        raise RuntimeError("the device fails")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "sample_at", broken)
        with pytest.raises(RuntimeError, match="the device fails"):
            client.drafted_there([0, 2, 1], {0: 1, 2: 3})
    client.drafted_there([1, 0, 2], {0: 1, 1: 2, 2: 1})
    client.drafted_there([0, 1, 2], {})
    found = client.drain()
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(3)] == [7, 7, 5]
