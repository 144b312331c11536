"""Steps with drafts on two ranks: the tokens of one rank without."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker_svc.conftest import WORKER_CONFIG
from tests.worker_svc.parallel.test_tensor_parallel import column, on_ranks, save
from tests.worker_svc.runner.test_drafts import GREEDY, PENALIZED, SAMPLED, Driver, drafted, plain
from worker_svc.parallel.group import ALONE, Group
from worker_svc.startup import startup


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and another of the same vocabulary that drafts for it."""
    root = tmp_path_factory.mktemp("models")
    return save(root / "served", "llama-biases"), save(root / "drafts", "qwen3-tied")


def loaded(folders: tuple[Path, Path], group: Group) -> startup.LoadedModel:
    served, drafts = folders
    config = replace(WORKER_CONFIG, draft_model=drafts)
    return startup.load(config, served, "float32", "", group)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED])
def test_given_drafts_change_no_token(folders: tuple[Path, Path], sampling) -> None:
    expected = plain(loaded(folders, ALONE), sampling).tokens[0]

    def work(group: Group) -> list[int]:
        driver = Driver(loaded(folders, group), sampling)
        driver.enter()
        for right, wrong in ((3, 0), (1, 2), (0, 2), (4, 1)):
            ahead = drafted(expected, len(driver.tokens[0]), right, wrong)
            assert driver.verify(ahead) == [right + 1]
        return driver.tokens[0]

    for tokens in on_ranks(2, work):
        assert tokens == expected[: len(tokens)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED])
def test_a_draft_model_changes_no_token(folders: tuple[Path, Path], sampling) -> None:
    expected = plain(loaded(folders, ALONE), sampling).tokens[0]

    def work(group: Group) -> list[int]:
        driver = Driver(loaded(folders, group), sampling)
        driver.enter()
        for _ in range(4):
            driver.step(slots=column(0), num_scheduled=column(4), num_drafted=column(3))
        return driver.tokens[0]

    first, second = on_ranks(2, work)
    assert first == second == expected[: len(first)]
