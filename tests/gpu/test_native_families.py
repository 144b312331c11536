"""Every family of layers of ours on a GPU: tokens of transformers, in graphs and kernel by kernel.

Each family is computed in a process of its own, so that what one of them does to its device is no
other's; some of them at the same time, since most of it is compiling and waiting.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.native_family import CASES
from tests.pace import patience
from tests.worker_svc.transformers_models.families import WITH_PICTURES
from worker_svc.models import registry

ELSEWHERE = {"llama", "qwen2", "qwen3"}  # what other tests of GPUs serve
ROOT = Path(__file__).parents[2]
MOST_AT_ONCE, LONGEST_S = 4, 240
Answer = tuple[int, str]  # the exit code of a family's tests, and what they said


def answer(name: str) -> Answer:
    """Runs the tests of a family."""
    # Its own process of pytest: nothing of this one's, and of a run by several, is passed on.
    given = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # Oracles compute on the CPU: with a thread for each core each, they would wait for each other.
    given |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, "tests/gpu/native_family.py"],
            cwd=ROOT,
            env=given | {"FAMILY": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(LONGEST_S),
        )
    except subprocess.TimeoutExpired as late:
        return -1, f"{late}\n{late.stdout!r}"
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Answer]]]:
    """The answers of all families that are asked for, each once it is there."""
    items = (item for item in request.session.items if item.path == request.path)
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        yield {name: pool.submit(answer, name) for name in names}
        pool.shutdown(cancel_futures=True)


def test_every_family_has_a_case() -> None:
    files = {*registry.BUILT_IN.values()} - ELSEWHERE
    names = {case.written or name for name, case in CASES.items()}
    assert files == names - WITH_PICTURES.keys() - {"gemma4_moe"}  # of the same file as gemma4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, answers: dict[str, Future[Answer]]) -> None:
    code, said = answers[name].result()
    assert code == 0, said[-8000:]
