"""The model that answers, and its answers without drafts."""

from pathlib import Path

import pytest

from tests.e2e.speculation.cases import add_all, save_model
from tests.e2e.speculation.joined import Joined, Told


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="package")
def told_without(folder: Path) -> dict[int, Told]:
    joined = Joined(folder)
    add_all(joined)
    return joined.run()
