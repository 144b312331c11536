"""A GGUF file small enough to convert in milliseconds, and the real model converted afresh."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from default_model import source
from default_model.folder import materialize
from default_model.source import GgufSource
from tests.gguf_files import tiny_file


@pytest.fixture
def tiny(tmp_path: Path) -> GgufSource:
    """A small model."""
    return GgufSource(tiny_file().write(tmp_path / "Tiny-Instruct.Q8_0.gguf"), "tiny-1.0")


@pytest.fixture(scope="session")
def fresh_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real default model, converted by the code under test and not taken from the cache."""
    root = tmp_path_factory.mktemp("default-model")
    yield materialize(source.find(), root)
    shutil.rmtree(root)  # half a gigabyte
