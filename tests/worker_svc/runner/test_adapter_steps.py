"""Steps with adapters as CUDA runs them, interpreted: tokens of the eager runner of the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.worker_svc.adapters.peft_folders import MadeAdapter
from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.models.test_gemma import CHECKPOINTS as GEMMAS
from tests.worker_svc.models.test_gemma import SIZES as GEMMA_SIZES
from tests.worker_svc.models.test_models import LLAMA, QWEN3, SHAPE
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.runner.interpreted import (
    LIMITS,
    composed_runner,
    eager_runner,
    interpreted_runner,
    needs_interpreter,
)
from tests.worker_svc.runner.test_step_graphs import (
    ASKING,
    DRAWN,
    GREEDY,
    enter,
    play,
    step_of,
)
from tests.worker_svc.transformers_models.families import write
from wire.adapters import AdapterSource
from worker_svc.adapters.reading import AdapterReader
from worker_svc.adapters.store import AdapterLimits, AdapterOrder, AdapterStore
from worker_svc.protocol.step import NewSequence, RowSampling
from worker_svc.runner.cuda_runner import ComputePlan, CudaRunner
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [*needs_interpreter, pytest.mark.usefixtures("few_programs")]

ADAPTERS = AdapterLimits(max_loras=2, max_rank=24, max_cpu=4)
MADE = (
    MadeAdapter(seed=1, gain=3.0),
    MadeAdapter(("q_proj", "v_proj", "down_proj"), rank=24, seed=2, gain=3.0),
    MadeAdapter(rank=4, ranks={"q_proj": 1, "o_proj": 17}, seed=3, gain=3.0),
)
SIZES: dict[str, Any] = SHAPE | {
    "vocab_size": LIMITS.vocab_size,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FUSED = {
    "llama with biases": (LLAMA, SIZES | {"attention_bias": True, "mlp_bias": True}),
    "qwen3": (QWEN3, SIZES),
    "gemma3": (GEMMAS["gemma3"][0], SIZES | GEMMA_SIZES | GEMMAS["gemma3"][1]),
}
COMPOSED = {  # the modules that take adapters
    "lfm2": ("q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
    "qwen3_5": ("k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
Steps = list[tuple[Any, ...]]


class Preparing:
    """Adapters in folders, of which a runner's sequences have one each."""

    def __init__(self, folders: list[Path], runner: ModelRunner) -> None:
        assert runner.state.adapters is not None
        self.store: AdapterStore = runner.state.adapters
        self.sources: list[AdapterSource] = []
        for folder in folders:
            self.sources.append(self.store.names.load(folder.name, str(folder)))
        self.num_prepared = 0

    def enter(
        self, slot: int, prompt: list[int], which: int, sampling: RowSampling = GREEDY
    ) -> NewSequence:
        self.num_prepared += 1
        self.store.fetch(AdapterOrder(self.num_prepared, self.sources[which]))
        return replace(enter(slot, prompt, sampling), adapter_preparation=self.num_prepared)

    def steps(self) -> Steps:
        """Prompts, chunks and decodes; rows without an adapter; one in the place of another."""
        again = self.enter(4, make_prompt(11, seed=4), 2)
        return [
            ({1: 13, 4: 21}, (self.enter(1, make_prompt(13), 0), enter(4, make_prompt(40)))),
            ({1: 1, 4: 19, 0: 3}, (self.enter(0, make_prompt(3), 1, DRAWN),)),
            ({0: 1, 1: 1, 4: 1}, ()),
            ({4: 1, 1: 1}, ()),  # one with an adapter, and one without
            ({4: 1}, (), (0,)),  # none with an adapter
            ({1: 1, 4: 11}, (again,), (4,)),  # the third takes the second one's place
            ({1: 1, 4: 1}, ()),
            ({1: 1, 4: 1, 2: 9}, (self.enter(2, make_prompt(9), 2, ASKING),)),
            ({1: 1, 4: 1, 2: 1}, ()),
        ]


def with_host_adapters(runner: ModelRunner) -> ModelRunner:
    """The eager runner, whose layers add adapters themselves; `test_merged.py` compares those."""
    layers = runner._model.adaptable  # type: ignore[attr-defined]
    reader = AdapterReader(layers.targets, ADAPTERS.max_rank, layers.dtype, layers.pack)
    runner.state.adapters = AdapterStore(reader, ADAPTERS, layers.take())
    return runner


def adapters_in(base: Path, folder: Path, made: tuple[MadeAdapter, ...] = MADE) -> list[Path]:
    model = AutoModelForCausalLM.from_pretrained(base).float()
    return [one.save(model, folder / f"a{index}") for index, one in enumerate(made)]


def played(runner: ModelRunner, folders: list[Path]) -> list:
    return play(runner, *Preparing(folders, runner).steps())


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, sizes = FUSED[name]
    save_random_model(tmp_path / "base", family, sizes)
    folders = adapters_in(tmp_path / "base", tmp_path)
    expected = played(with_host_adapters(eager_runner(tmp_path / "base")), folders)
    runner = interpreted_runner(tmp_path / "base", monkeypatch, ADAPTERS)
    assert played(runner, folders) == expected


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write(name, tmp_path / name, {"head_dim": 16, "hidden_size": 64})
    folders = adapters_in(
        base, tmp_path, tuple(replace(one, modules=COMPOSED[name]) for one in MADE)
    )
    expected = played(with_host_adapters(eager_runner(base)), folders)
    assert played(composed_runner(base, monkeypatch, ADAPTERS), folders) == expected


def test_kernel_by_kernel(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that no graph holds."""
    folders = adapters_in(llama_folder, tmp_path)
    expected = played(with_host_adapters(eager_runner(llama_folder)), folders)
    runner = interpreted_runner(llama_folder, monkeypatch, ADAPTERS)
    plan = CudaRunner._plan

    def plan_no_graph(self: CudaRunner, *args: Any) -> ComputePlan:
        return ComputePlan(is_plain=False, adapts=plan(self, *args).adapts)

    monkeypatch.setattr(CudaRunner, "_plan", plan_no_graph)
    assert played(runner, folders) == expected


def test_adapters_change_tokens_and_rows_without_one_keep_theirs(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = adapters_in(llama_folder, tmp_path)
    runner = interpreted_runner(llama_folder, monkeypatch, ADAPTERS)
    made, prompt = Preparing(folders, runner), make_prompt(9)
    both = (made.enter(1, prompt, 0), enter(4, prompt), made.enter(5, prompt, 1))
    rows = {1: 1, 4: 1, 5: 1}
    steps: Steps = [({1: 9, 4: 9, 5: 9}, both), *[(rows, ())] * 4]
    together = play(runner, *steps)
    alone: Steps = [({4: 9}, (enter(4, prompt),)), *[({4: 1}, ())] * 4]
    without = play(interpreted_runner(llama_folder, monkeypatch), *alone)
    by_row = [[tokens[row] for tokens, _ in together] for row in range(3)]
    assert by_row[1] == [tokens[0] for tokens, _ in without]
    assert len({*map(tuple, by_row)}) == 3


def test_a_step_that_fails_leaves_the_adapters_of_its_slots(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed step would have taken the place of one that still computes."""
    folders = adapters_in(llama_folder, tmp_path)
    runner = interpreted_runner(llama_folder, monkeypatch, ADAPTERS)
    made, prompt = Preparing(folders, runner), make_prompt(9)
    first = (made.enter(1, prompt, 0), made.enter(4, prompt, 1))
    steps: Steps = [({1: 9, 4: 9}, first), *[({1: 1, 4: 1}, ())] * 2]
    expected = play(runner, *steps)
    made = Preparing(folders, other := interpreted_runner(llama_folder, monkeypatch, ADAPTERS))
    first = (made.enter(1, prompt, 0), made.enter(4, prompt, 1))
    found = play(other, ({1: 9, 4: 9}, first))
    third = made.enter(1, prompt, 2)
    output = other.execute(step_of(2, {1: 9, 4: 1}, (third,), (1,)))
    assert "all 2 places of adapters are in use" in output.error
    for step_id in (2, 3):
        output = other.execute(step_of(step_id, {1: 1, 4: 1}, ()))
        found.append((output.token_ids.tolist(), None))
    assert found == expected
