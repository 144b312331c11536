"""Sessions of hybrids: each turn begins after a snapshot, and gives the tokens of a cold one.

A lost worker changes nothing.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_svc.engine import Engine
from tests.worker_svc.conftest import Worker, serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import VOCAB_SIZE, write

NUM_SESSIONS, NUM_TURNS, NUM_ASKED, NUM_ANSWERED = 3, 8, 52, 12
SYSTEM = test_served.prompt_of(200)
MAX_MODEL_LEN = 720
CONFIG = replace(
    test_served.CONFIG,
    num_kv_blocks=1600,
    max_num_batched_tokens=64,
    max_model_len=MAX_MODEL_LEN,
    state_snapshots=24,
)


@pytest.fixture(
    scope="module",
    params=[
        ("nemotron_h", "transformers"),
        ("qwen3_5", "native"),
        ("nemotron_h", "native"),
        ("lfm2", "native"),
    ],
    ids="-".join,
)
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    sizes = {"max_position_embeddings": MAX_MODEL_LEN}
    name, implementation = request.param
    folder = write(name, tmp_path_factory.mktemp("turns") / name, sizes)
    with serving(replace(CONFIG, model_impl=implementation), folder) as served:
        yield served


async def sessions(engine: Engine, stub: Any) -> list[list[int]]:
    """The answers of all turns, the sessions side by side."""

    async def session(number: int) -> list[list[int]]:
        random, known, answers = np.random.default_rng(number), list(SYSTEM), []
        for _ in range(NUM_TURNS):
            known += random.integers(3, VOCAB_SIZE, NUM_ASKED).tolist()
            answer = await test_served.generate(stub, known, NUM_ANSWERED)
            answers.append(answer)
            known += answer
        return answers

    found = await asyncio.gather(*map(session, range(NUM_SESSIONS)))
    return [answer for answers in found for answer in answers]


async def test_turns_hit_four_fifths_and_answer_as_without_a_cache(worker: Worker) -> None:
    cold, _ = await test_served.under_a_scheduler(worker, sessions, enable_prefix_caching=False)
    warm, engine = await test_served.under_a_scheduler(worker, sessions)
    assert warm == cold
    counters = engine.groups[0].core.counters
    assert counters.prefix_hit_tokens > 0.8 * counters.prefix_query_tokens

    async def disturbed(engine: Engine, stub: Any) -> list[list[int]]:
        work = asyncio.create_task(sessions(engine, stub))
        core = engine.groups[0].core
        for num_turns in (2, 5):
            while core.num_finished < NUM_SESSIONS * num_turns:
                assert not work.done()
                await asyncio.sleep(0.001)
            session = worker.server._session
            session.end(session._stream, None)
        return await work

    found, engine = await test_served.under_a_scheduler(worker, disturbed)
    assert found == cold
    assert engine.groups[0].num_recoveries == 2
