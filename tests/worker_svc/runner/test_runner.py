"""The model runner without a wire: failures, rows that are not finite, what a step leaves."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.conftest import WORKER_CONFIG, Greedy, make_prompt
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.protocol.step import BadStep, NewSequence, RowSampling, StepInput, StepOutput
from worker_svc.runner.model_runner import ModelRunner
from worker_svc.startup import startup

POISON = 99


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def sequence(slot: int, token_ids: list[int], block_ids: list[int]) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=f"request-{slot}",
        token_ids=np.array(token_ids, dtype=np.int32),
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=np.array(block_ids, dtype=np.int32),
        sampling=RowSampling(),
    )


class Driver:
    """Numbers steps and shortens them to what a test wants to say."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0

    def step(self, *new: NewSequence, rows: dict[int, int], **fields: object) -> StepOutput:
        self.step_id += 1
        step = StepInput(
            step_id=self.step_id,
            new_sequences=new,
            slots=column(*rows),
            num_scheduled=column(*rows.values()),
            **fields,
        )
        return self.runner.execute(step)


class BreakableModel:
    """The model, with a forward pass that fails when told to."""

    def __init__(self, model: object) -> None:
        self._model = model
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, *inputs: object) -> torch.Tensor:
        hidden = self._model.forward(*inputs)
        if self.error is not None:
            raise self.error
        return hidden


@pytest.fixture(scope="module")
def loaded(llama_folder: Path) -> startup.LoadedModel:
    return startup.load(WORKER_CONFIG, llama_folder, "float32", "")


@pytest.fixture
def model(loaded: startup.LoadedModel) -> BreakableModel:
    return BreakableModel(loaded.decoder)


@pytest.fixture
def driver(loaded: startup.LoadedModel, model: BreakableModel) -> Driver:
    breakable = dataclasses.replace(loaded, decoder=model)
    return Driver(startup.build_runner(WORKER_CONFIG, breakable, num_blocks=64))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("broken")])
def test_a_failed_step_leaves_no_trace_and_can_be_sent_again(
    driver: Driver, model: BreakableModel, greedy: Greedy, error: Exception
) -> None:
    old, new = make_prompt(20, seed=1), make_prompt(7, seed=2)
    driver.step(sequence(0, old, [1, 2]), sequence(1, new, [3]), rows={0: 20, 1: 7})
    replaced = sequence(1, old[:4], [9])

    def step() -> StepOutput:
        # Frees a slot, fills it anew and lets another grow: all of it must be undone.
        return driver.step(
            replaced,
            rows={0: 1, 1: 4},
            freed_slots=column(1),
            appended_slots=column(0),
            appended_block_ids=column(5),
        )

    state = driver.runner.state
    before = state.table
    rows_before, blocks_before = state.token_rows[1].clone(), state.block_tables[1].clone()
    model.error = error
    output = step()
    assert output.error == f"{type(error).__name__}: {error}"
    assert len(output.token_ids) == 0
    assert state.table is before
    assert torch.equal(state.token_rows[1, :7], rows_before[:7])
    assert torch.equal(state.block_tables[1], blocks_before)
    model.error = None
    output = step()
    assert output.token_ids.tolist() == [greedy(old, 2)[1], greedy(old[:4], 1)[0]]


def test_after_a_failed_step_the_sequences_go_on_as_they_were(
    driver: Driver, model: BreakableModel, greedy: Greedy
) -> None:
    prompt = make_prompt(5)
    tokens = driver.step(sequence(0, prompt, [1]), rows={0: 5}).token_ids.tolist()
    for _ in range(4):
        model.error = RuntimeError("broken")
        assert driver.step(rows={0: 1}).error
        model.error = None
        tokens += driver.step(rows={0: 1}).token_ids.tolist()
    assert tokens == greedy(prompt, 5)


def test_a_failed_step_is_not_the_previous_one_of_same_rows(
    driver: Driver, model: BreakableModel
) -> None:
    driver.step(sequence(0, [5, 6], [1]), rows={0: 2})
    model.error = RuntimeError("broken")
    driver.step(rows={0: 1})
    with pytest.raises(BadStep, match="same_rows"):
        driver.step(rows={}, same_rows=True)


def test_a_refused_step_changes_nothing(driver: Driver) -> None:
    driver.step(sequence(0, [5, 6], [1]), rows={0: 2})
    before = driver.runner.state.table
    with pytest.raises(BadStep, match="slot 3 is empty"):
        driver.step(sequence(1, [7], [2]), rows={3: 1}, freed_slots=column(0))
    assert driver.runner.state.table is before


@pytest.fixture(scope="module")
def poisoned_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with one token whose embedding is not a number."""
    folder = tmp_path_factory.mktemp("models") / "poisoned"
    folder.mkdir()
    (folder / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    weights = load_file(llama_folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_row_that_is_not_finite_fails_alone(poisoned_folder: Path, greedy: Greedy) -> None:
    loaded = startup.load(WORKER_CONFIG, poisoned_folder, "float32", "")
    driver = Driver(startup.build_runner(WORKER_CONFIG, loaded, num_blocks=64))
    prompts = [
        [token for token in make_prompt(length, seed=length) if token != POISON]
        for length in (18, 6, 33)
    ]
    prompts[1][3] = POISON
    new = [
        sequence(slot, prompt, [1 + slot, 11 + slot, 21 + slot])
        for slot, prompt in enumerate(prompts)
    ]
    outputs = [driver.step(*new, rows={slot: len(p) for slot, p in enumerate(prompts)})]
    outputs += [driver.step(rows={0: 1, 1: 1, 2: 1}) for _ in range(4)]
    assert [output.row_status.tolist() for output in outputs] == [[0, 1, 0]] * 5
    healthy = [[output.token_ids[slot] for output in outputs] for slot in (0, 2)]
    assert healthy == [greedy(prompts[0], 5), greedy(prompts[2], 5)]
    # The blocks it spoiled serve the next sequence.
    reused = make_prompt(20, seed=9)
    output = driver.step(sequence(1, reused, [2, 12]), rows={0: 1, 1: 20}, freed_slots=column(1))
    assert output.row_status is None
    assert output.token_ids[1] == greedy(reused, 1)[0]


def test_the_null_block_is_never_written(driver: Driver, loaded: startup.LoadedModel) -> None:
    driver.runner.warm_up()
    driver.step(sequence(0, make_prompt(20), [1, 2]), rows={0: 20})
    driver.step(rows={0: 1})
    cache = driver.runner.kv_cache
    for index in range(loaded.decoder.spec.num_layers):
        for side in cache.layer(index):
            assert not side[0].any()
            assert side[1].any()


def test_only_rows_that_reach_their_end_cost_logits(
    driver: Driver, model: BreakableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    vocab_part: Callable[[torch.Tensor], VocabPart] = model._model.vocab_part
    monkeypatch.setattr(
        model,
        "vocab_part",
        lambda hidden: shapes.append(tuple(hidden.shape)) or vocab_part(hidden),
        raising=False,
    )
    new = [sequence(slot, make_prompt(30), [1 + 2 * slot, 2 + 2 * slot]) for slot in range(3)]
    assert len(driver.step(*new, rows={0: 29, 1: 30, 2: 3}).token_ids) == 1
    assert len(driver.step(rows={2: 10}).token_ids) == 0
    assert shapes == [(1, 64)]


def test_the_last_256_steps_are_kept(driver: Driver) -> None:
    driver.step(sequence(0, [5], [1]), rows={})
    for _ in range(300):
        driver.step(rows={})
    records = driver.runner.records
    assert [records[0].step_id, records[-1].step_id, len(records)] == [46, 301, 256]


def test_a_step_tells_how_long_the_device_had_nothing_to_do_before_it(driver: Driver) -> None:
    first = driver.step(sequence(0, [5, 6], [1]), rows={0: 2})
    assert first.timings.idle_us == 0  # before it there was nothing
    time.sleep(0.02)
    driver.step(rows={})  # computes nothing, so the device idles on
    second = driver.step(rows={0: 1})
    assert second.timings.idle_us >= 20_000
    # Without a pause there is less; one of some steps is not interrupted by other processes.
    pauses_us = [driver.step(rows={0: 1}).timings.idle_us for _ in range(8)]
    assert min(pauses_us) < second.timings.idle_us


def test_only_steps_that_decode_are_summed_up(driver: Driver) -> None:
    driver.step(sequence(0, [5, 6], [1]), rows={0: 2})
    time.sleep(0.02)
    driver.step(sequence(1, [7, 8, 9], [2]), rows={0: 1, 1: 3})  # after a wait for requests
    steps = [driver.step(rows={0: 1, 1: 1}).timings for _ in range(3)]
    spent = driver.runner.decode_time
    assert spent.num_steps == 3
    assert spent.idle_us == sum(step.idle_us for step in steps)
    assert spent.busy_us == sum(step.forward_us + step.sample_us + step.copy_us for step in steps)
    assert [record.timings for record in driver.runner.records][-3:] == steps
