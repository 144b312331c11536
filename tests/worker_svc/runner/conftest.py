"""Fixtures: the runner of CUDA, interpreted, and that of the CPU with the same limits."""

from pathlib import Path

import pytest

from tests.worker_svc.runner.interpreted import eager_runner, interpreted_runner
from worker_svc.runner.model_runner import ModelRunner


@pytest.fixture
def eager(llama_folder: Path) -> ModelRunner:
    return eager_runner(llama_folder)


@pytest.fixture
def interpreted(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, few_programs: None
) -> ModelRunner:
    return interpreted_runner(llama_folder, monkeypatch)
