"""What a draft model knows of blocks, and the steps whose drafts it makes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.worker_svc.conftest import WORKER_CONFIG
from tests.worker_svc.runner.test_drafts import GREEDY, PENALIZED, SAMPLED, Driver, column, plain
from worker_svc.config import UnsupportedOption
from worker_svc.protocol.step import BadStep, Limits, NewSequence, StepInput, StepMoves
from worker_svc.runner.draft_model import FilledBlocks
from worker_svc.startup import startup

LIMITS = Limits(
    num_blocks=20,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    vocab_size=64,
    num_host_blocks=4,
)


def table(*blocks: int) -> np.ndarray:
    return np.array([blocks], dtype=np.int32)


def filled_up_to(end: int, *blocks: int) -> FilledBlocks:
    filled = FilledBlocks(LIMITS)
    filled.fill(table(*blocks), column(0), column(end))
    return filled


def entering(num_computed: int, *blocks: int) -> StepInput:
    sequence = NewSequence(
        slot=0,
        request_id="a",
        token_ids=np.zeros(num_computed + 1, dtype=np.int32),
        num_prompt_tokens=num_computed + 1,
        num_computed_tokens=num_computed,
        block_ids=np.array(blocks, dtype=np.int32),
    )
    return StepInput(1, new_sequences=(sequence,))


def count(filled: FilledBlocks, *blocks: int) -> int:
    return int(filled.num_filled(table(*blocks))[0])


def moves(**pairs: tuple[int, int]) -> StepMoves:
    none = column()
    names = ("swapped_out", "to_host", "from_host", "swapped_in", "copied_from", "copied_to")
    fields = dict.fromkeys(names, none)
    for name, value in pairs.items():
        first, second = name.split("__")
        fields[first], fields[second] = column(value[0]), column(value[1])
    return StepMoves(**fields)


def test_what_was_filled_counts_up_to_the_first_gap() -> None:
    filled = filled_up_to(10, 3, 5, 7)
    assert count(filled, 3, 5, 7) == 10
    assert count(filled, 3, 5, 9) == 8
    assert count(filled, 5, 9, 7) == 4
    assert count(filled, 9, 3, 5) == 0


def test_a_shared_prefix_stays_filled_and_new_blocks_are_empty() -> None:
    filled = filled_up_to(12, 3, 5, 7)
    filled.apply(entering(8, 3, 5, 7))
    assert count(filled, 3, 5, 7) == 8
    filled.apply(StepInput(2, appended_slots=column(0), appended_block_ids=column(5)))
    assert count(filled, 3, 5, 7) == 4


def test_a_copied_block_is_filled_as_far_as_both_have_the_same_tokens() -> None:
    filled = filled_up_to(8, 3, 5)
    copying = replace(entering(6, 3, 9), moves=moves(copied_from__copied_to=(5, 9)))
    filled.apply(copying)
    assert count(filled, 3, 9) == 6 and count(filled, 3, 5) == 8


def test_swapped_blocks_keep_what_they_hold() -> None:
    filled = filled_up_to(7, 3, 5)
    filled.apply(StepInput(1, moves=moves(swapped_out__to_host=(5, 2))))
    filled.apply(StepInput(2, appended_slots=column(0), appended_block_ids=column(5)))
    assert count(filled, 3, 5) == 4
    filled.apply(replace(entering(7, 3, 8), moves=moves(from_host__swapped_in=(2, 8))))
    assert count(filled, 3, 8) == 7


def test_a_reset_empties_all_blocks_but_the_null_block() -> None:
    filled = filled_up_to(7, 3, 5)
    filled.apply(StepInput(1, reset=True))
    assert count(filled, 3, 5) == 0 and count(filled, 0, 3) == 4


@pytest.fixture(scope="module")
def loaded(llama_folder: Path) -> startup.LoadedModel:
    config = replace(WORKER_CONFIG, draft_model=llama_folder)
    return startup.load(config, llama_folder, "float32", "")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED])
def test_the_same_model_is_always_right(loaded: startup.LoadedModel, sampling) -> None:
    expected, driver = plain(loaded, sampling), Driver(loaded, sampling)
    driver.enter()
    for num_drafted in (3, 1, 4, 2):
        driver.step(
            slots=column(0), num_scheduled=column(1 + num_drafted), num_drafted=column(num_drafted)
        )
        driver.step(slots=column(0))
    assert driver.tokens[0] == expected.tokens[0][: 1 + 10 + 8]


def test_a_worker_without_a_draft_model_refuses_to_draft(llama_folder: Path) -> None:
    driver = Driver(startup.load(WORKER_CONFIG, llama_folder, "float32", ""), GREEDY)
    driver.enter()
    with pytest.raises(BadStep, match="draft_token_ids: is empty, and this worker has no draft"):
        driver.step(slots=column(0), num_scheduled=column(3), num_drafted=column(2))


def test_blocks_are_sized_for_both_models(loaded: startup.LoadedModel, llama_folder: Path) -> None:
    config = replace(WORKER_CONFIG, num_kv_blocks=0, kv_cache_gib=0.01)
    alone = startup.load(config, llama_folder, "float32", "")
    both, one = (startup.build_runner(config, model, 0).limits for model in (loaded, alone))
    assert both.num_blocks == one.num_blocks // 2


def test_the_worker_is_described_with_its_draft_model(loaded: startup.LoadedModel) -> None:
    runner = startup.build_runner(WORKER_CONFIG, loaded, 64)
    described = startup.describe(loaded, runner, 1).draft_model
    assert described is not None and described.config_sha256 == loaded.facts.config_sha256


def test_another_vocabulary_is_refused_by_name(llama_folder: Path, other_vocabulary: Path) -> None:
    config = replace(WORKER_CONFIG, draft_model=other_vocabulary)
    with pytest.raises(UnsupportedOption, match=r"draft_model: .* has vocab_size 80, the"):
        startup.load(config, llama_folder, "float32", "")


@pytest.fixture
def other_vocabulary(llama_folder: Path, tmp_path: Path) -> Path:
    config = (llama_folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 128', '"vocab_size": 80'))
    return tmp_path
