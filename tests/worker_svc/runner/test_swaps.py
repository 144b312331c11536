"""Swaps between steps of both runners, that of CUDA interpreted: the tokens of a pause."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.test_cuda_runner import Client
from tests.worker_svc.runner import interpreted
from tests.worker_svc.runner.interpreted import (
    BLOCK_SIZE,
    BLOCKS_PER_SEQ,
    eager_runner,
    interpreted_runner,
    needs_interpreter,
)
from tests.worker_svc.runner.swapping import NUM_HOST_BLOCKS, SwapPlay
from worker_svc.runner.model_runner import ModelRunner

pytestmark = needs_interpreter


@pytest.fixture
def runners(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, few_programs: None
) -> tuple[ModelRunner, ModelRunner]:
    """That of the CPU, and that of CUDA."""
    limits = replace(interpreted.LIMITS, num_host_blocks=NUM_HOST_BLOCKS)
    monkeypatch.setattr(interpreted, "LIMITS", limits)
    return eager_runner(llama_folder), interpreted_runner(llama_folder, monkeypatch)


def tokens_of(runner: ModelRunner, play: Callable[[Client], None]) -> dict[int, list[int]]:
    client = Client(runner)
    play(client)
    assert all(status is None for status in client.statuses)
    return client.tokens


@pytest.mark.parametrize("arrives", [False, True], ids=["decoding", "mixed"])
def test_a_sequence_goes_on_from_what_was_swapped_as_after_a_pause(
    runners: tuple[ModelRunner, ModelRunner], arrives: bool
) -> None:
    play = SwapPlay(BLOCK_SIZE, BLOCKS_PER_SEQ, arrives)
    paused = tokens_of(runners[0], replace(play, swaps=False))
    assert all(len(set(tokens)) > 1 for tokens in paused.values())
    for runner in runners:
        assert tokens_of(runner, play) == paused
