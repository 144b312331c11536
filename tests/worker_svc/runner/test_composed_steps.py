"""Steps of hybrids as CUDA runs them, interpreted: tokens of the eager runner."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.runner.interpreted import composed_runner, eager_runner, needs_interpreter
from tests.worker_svc.runner.test_step_graphs import ASKING, DRAWN, FILTERED, enter, play, step_of
from tests.worker_svc.transformers_models.families import write
from worker_svc.runner.device_slots import SlotsOnDevice

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
    assert play(runner, *steps) == expected
    assert runner._decode_graphs._loaded is not None, "steps went another way"


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
