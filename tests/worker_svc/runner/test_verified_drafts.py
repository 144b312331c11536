"""Drafts verified by what CUDA launches, interpreted: in graphs of steps and kernel by kernel."""

import numpy as np
import pytest

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.runner.interpreted import BLOCKS_PER_SEQ, needs_interpreter
from tests.worker_svc.runner.verifying import Told, Verifying, check_same, without_drafts
from worker_svc.protocol.step import RowSampling
from worker_svc.runner.cuda_runner import CudaRunner
from worker_svc.runner.model_runner import ModelRunner

pytestmark = needs_interpreter

PROMPTS = {slot: make_prompt(length, seed=slot) for slot, length in enumerate((5, 4, 6, 9))}
HOW = {
    0: RowSampling(num_top_logprobs=2),
    1: RowSampling(temperature=1.2, top_p=0.9, seed=4),
    2: RowSampling(
        temperature=0.9,
        seed=3,
        presence_penalty=1.5,
        repetition_penalty=1.3,
        min_tokens=9,
        stop_token_ids=(3, 4, 5),
        logit_bias=((11, 2.0),),
        num_top_logprobs=0,
    ),
    3: RowSampling(temperature=1.0, seed=8),
}


def mixed(runner: ModelRunner, expected: Told) -> Told:
    """Right, wrong and partly right drafts among rows without, a prompt, and plain decodes."""
    client = Verifying(runner, BLOCKS_PER_SEQ, expected)
    first = {slot: PROMPTS[slot] for slot in (0, 1, 2)}
    new = [client.enter(slot, prompt, HOW[slot]) for slot, prompt in first.items()]
    client.step({slot: len(prompt) for slot, prompt in first.items()}, new=new)
    client.decode([1, 0, 2], {0: (2, 1)})
    client.decode([0, 1, 2])
    client.decode([0, 1, 2], {1: (1, 0), 2: (0, 2)})
    entering = client.enter(3, PROMPTS[3], HOW[3])
    chunk = {2: 1, 3: 6, 0: 1, 1: 1}
    client.step(chunk, {2: (1, 0), 0: (0, 1)}, new=[entering], unfinished=[3])
    client.step({1: 1, 3: 3, 2: 1})
    client.decode([3, 1, 0, 2], {0: (4, 1), 3: (1, 1)})  # more positions than a graph has
    client.decode([1, 3])
    client.decode([1, 3])
    return client.drain()


def test_tokens_and_states_with_drafts_are_those_of_the_eager_runner(
    eager: ModelRunner, interpreted: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(interpreted, CudaRunner)
    expected = without_drafts(eager, BLOCKS_PER_SEQ, PROMPTS, HOW, 14)
    in_graphs, by_kernels = [], []
    graphs, compute = interpreted._step_graphs, interpreted._compute_eagerly
    begin = graphs.begin
    monkeypatch.setattr(
        graphs, "begin", lambda step, **how: (in_graphs.append(step), begin(step, **how))
    )
    monkeypatch.setattr(
        interpreted, "_compute_eagerly", lambda *all: (by_kernels.append(all), compute(*all))[1]
    )
    found = mixed(interpreted, expected)
    assert (len(in_graphs), len(by_kernels)) == (6, 1)
    check_same(found, expected)
    assert [len(found.tokens[slot]) for slot in range(4)] == [12, 10, 8, 5]
    assert found.hashes == mixed(eager, expected).hashes


def test_a_failed_verification_leaves_no_trace(
    eager: ModelRunner, interpreted: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, how = {1: PROMPTS[1]}, {1: HOW[1]}
    expected = without_drafts(eager, BLOCKS_PER_SEQ, prompts, how, 8)
    assert isinstance(interpreted, CudaRunner)
    client = Verifying(interpreted, BLOCKS_PER_SEQ, expected)
    client.step({1: 4}, new=[client.enter(1, PROMPTS[1], HOW[1])])
    client.drain()
    table = interpreted.state.table
    state = interpreted.slots.slot_state.clone()

    def broken(*arguments: object) -> None:
        advance(*arguments)  # type: ignore[arg-type]
        raise RuntimeError("the device fails")

    advance = interpreted.slots.advance
    with monkeypatch.context() as patch:
        patch.setattr(interpreted.slots, "advance", broken)
        with pytest.raises(RuntimeError, match="the device fails"):
            client.decode([1], {1: (2, 1)})
    assert interpreted.state.table is table
    np.testing.assert_array_equal(interpreted.slots.slot_state, state)
    client.decode([1], {1: (2, 1)})
    client.decode([1])
    check_same(client.drain(), expected)
    assert client.told.hashes[-1] == expected.hashes[4]
