"""Steps of hybrids as CUDA runs them, interpreted: tokens of the eager runner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.models.test_composed import nothing_waits
from tests.worker_svc.runner.interpreted import composed_runner, eager_runner, needs_interpreter
from tests.worker_svc.runner.test_step_graphs import ASKING, DRAWN, FILTERED, enter, play, step_of
from tests.worker_svc.transformers_models.families import write
from worker_svc.protocol.step import SaveRequest
from worker_svc.runner.device_slots import SlotsOnDevice
from worker_svc.runner.graphs.step_map import StepMap
from worker_svc.runner.model_runner import ModelRunner

pytestmark = needs_interpreter

# With heads of a size that kernels serve.
SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}


@pytest.fixture(params=["qwen3_5_moe", "nemotron_h", "lfm2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(request.param, tmp_path / request.param, SIZES)


@pytest.mark.usefixtures("few_programs")
def test_prompts_chunks_and_decodes_give_the_tokens_of_the_eager_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = (enter(1, make_prompt(13)), enter(4, make_prompt(30, seed=2), DRAWN))
    again = enter(0, make_prompt(2, seed=4), ASKING)  # in a slot that had another sequence
    steps: list[tuple[Any, ...]] = [
        ({1: 13, 4: 21}, new),
        ({1: 1, 4: 9, 0: 3}, (enter(0, make_prompt(3, seed=3), FILTERED),)),
        ({0: 1, 1: 1, 4: 1}, ()),  # in a graph of four rows
        ({0: 1, 4: 1}, ()),
        ({4: 1, 1: 1}, ()),
        ({1: 1, 0: 2}, (again,), (0,)),
        ({0: 1, 1: 1}, ()),
        ({0: 1, 1: 1, 4: 1}, ()),
    ]
    expected = play(eager_runner(folder), *steps)
    runner = composed_runner(folder, monkeypatch)
    recorded = noted(runner, monkeypatch)
    assert play(runner, *steps) == expected
    assert runner._decode_graphs._loaded is not None, "steps went another way"
    assert recorded == [34, 13, 3, 2, 3], "steps of so many tokens are graphs of any rows"


def noted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that is computed by graphs of any rows, as they come."""
    graphs, found = runner._step_graphs, []
    begin = graphs.begin

    def noting(step: StepMap, **how: bool) -> None:
        found.append(int(step.layout.columns(step.buffer[: step.layout.num_words]).counts[0]))
        begin(step, **how)

    monkeypatch.setattr(graphs, "begin", noting)
    return found


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("folder", ["lfm2", "qwen3_5"], indirect=True)
def test_a_snapshot_within_a_prompt_is_what_another_prompt_begins_after(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(20)
    first, other = enter(1, prompt), enter(4, prompt[:8] + make_prompt(9, seed=2))
    blocks = np.concatenate([first.block_ids[:1], other.block_ids[1:]])  # of 8 tokens each
    after = replace(other, num_computed_tokens=8, state_snapshot=1, block_ids=blocks)
    steps: list[tuple[Any, ...]] = [
        ({1: 14, 0: 2}, (first, enter(0, make_prompt(2))), (), (SaveRequest(1, 8, 1),)),
        ({1: 6, 4: 9, 0: 1}, (after,)),
        ({1: 1, 4: 1}, ()),
    ]
    expected = play(eager_runner(folder), *steps)
    runner = composed_runner(folder, monkeypatch)
    recorded = noted(runner, monkeypatch)
    assert play(runner, *steps) == expected
    assert recorded == [16]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("folder", ["qwen3_5_moe", "nemotron_h"], indirect=True)
def test_graphs_of_any_rows_wait_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = composed_runner(folder, monkeypatch)
    graphs = runner._step_graphs
    step = step_of(1, {1: 5, 4: 1}, (enter(1, make_prompt(5)), enter(4, make_prompt(1))))
    assert not runner.execute(step).error
    with torch.inference_mode(), nothing_waits():
        graphs._begin(graphs._layers[False], 8)
        graphs._begin(graphs._layers[False], graphs.decode_sizes[0], is_decode=True)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("folder", ["minimax_m2", "deepseek_v3"], indirect=True)
def test_steps_with_prompts_are_graphs_where_there_are_no_states(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = (enter(1, make_prompt(5)), enter(4, make_prompt(7, seed=2), ASKING))
    steps = [({1: 5, 4: 4}, new), ({1: 1, 4: 3}, ())]
    expected = play(eager_runner(folder), *steps)
    runner = composed_runner(folder, monkeypatch)
    assert runner._step_graphs is not None
    assert play(runner, *steps) == expected


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_a_step_that_fails_leaves_states_as_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [({1: 9, 4: 5}, (enter(1, make_prompt(9)), enter(4, make_prompt(5, seed=2))))]
    decode: tuple[Any, ...] = ({1: 1, 4: 1}, ())
    expected = play(eager_runner(folder), *steps, decode, decode)
    runner = composed_runner(folder, monkeypatch)
    assert play(runner, *steps) == expected[:1]

    def fail(*args: object) -> None:
        raise RuntimeError("by the test")

    with monkeypatch.context() as patched:
        patched.setattr(SlotsOnDevice, "draw", fail)  # after all layers
        assert "by the test" in runner.execute(step_of(2, *decode)).error
    found = [runner.execute(step_of(step_id, *decode)) for step_id in (3, 4)]
    assert [output.token_ids.tolist() for output in found] == [tokens for tokens, _ in expected[1:]]
