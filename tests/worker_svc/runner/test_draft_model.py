"""The steps whose drafts a worker makes, and the draft models that it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker_svc.conftest import WORKER_CONFIG
from tests.worker_svc.runner.test_drafts import GREEDY, PENALIZED, SAMPLED, Driver, column, plain
from worker_svc.config import UnsupportedOption
from worker_svc.protocol.step import BadStep
from worker_svc.startup import startup


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
