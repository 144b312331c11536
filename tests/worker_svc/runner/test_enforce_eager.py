"""--enforce-eager: fused layers without graphs, interpreted; the tokens are the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker_svc.conftest import WORKER_CONFIG, make_prompt
from tests.worker_svc.runner.interpreted import (
    LIMITS,
    eager_runner,
    needs_interpreter,
    to_have_kernels,
    use_few_splits,
)
from tests.worker_svc.runner.test_step_graphs import ASKING, DRAWN, FILTERED, enter, play
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

pytestmark = needs_interpreter

CONFIG = replace(
    WORKER_CONFIG,
    block_size=LIMITS.block_size,
    num_kv_blocks=LIMITS.num_blocks,
    max_num_seqs=LIMITS.max_num_seqs,
    max_num_batched_tokens=LIMITS.max_num_batched_tokens,
    max_model_len=LIMITS.max_model_len,
)


def built(folder: Path, monkeypatch: pytest.MonkeyPatch, *, enforce_eager: bool) -> ModelRunner:
    """The runner that a worker makes where the layers are fused."""
    config = replace(CONFIG, enforce_eager=enforce_eager)
    to_have_kernels(folder, monkeypatch)
    use_few_splits(monkeypatch)
    loaded = startup.load(config, folder, config.dtype, "")
    loaded.decoder.fused = loaded.decoder._fuse()
    return startup.build_runner(config, loaded, LIMITS.num_blocks)


@pytest.mark.usefixtures("few_programs")
def test_fused_layers_without_graphs_give_the_tokens_of_those_by_torch(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        ({1: 13, 4: 21}, (enter(1, make_prompt(13)), enter(4, make_prompt(30, seed=2), DRAWN))),
        ({1: 1, 4: 9, 0: 3}, (enter(0, make_prompt(3, seed=3), FILTERED),)),
        ({0: 1, 1: 1, 4: 1, 2: 5}, (enter(2, make_prompt(5, seed=4), ASKING),)),
        ({0: 1, 1: 1, 2: 1, 4: 1}, ()),
    ]
    expected = play(eager_runner(llama_folder), *steps)
    runner = built(llama_folder, monkeypatch, enforce_eager=True)
    assert isinstance(runner, EagerRunner)
    assert not runner.graph_batch_sizes
    assert play(runner, *steps) == expected


def test_without_it_the_runner_has_graphs(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = built(llama_folder, monkeypatch, enforce_eager=False)
    assert not isinstance(runner, EagerRunner)
    assert runner.graph_batch_sizes[-1] == LIMITS.max_num_seqs
