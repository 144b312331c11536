"""Hybrids under a scheduler that drafts: the tokens of one that does not, whatever the length."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_svc import stepping
from scheduler_svc.core import Drafts, Scheduler
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.engine import Engine
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.options import Method, SpeculationOptions
from scheduler_svc.speculation.start import problem_with_worker
from tests.worker_svc.conftest import Attachment, Worker, serving
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import VOCAB_SIZE, write
from tests.worker_svc.transformers_models.test_lengths import EDGES
from tests.worker_svc.transformers_models.test_served import generate, prompt_of
from wire.versions import MINOR_WITH_DRAFTS_OF_STATES

NUM_TOKENS = 8
CONFIG = replace(
    test_served.CONFIG,
    num_kv_blocks=400,
    max_num_batched_tokens=48,
    max_model_len=150,
    model_impl="native",
)
DRAFTED = 5


class Foresight:
    """Drafts for every row: its next tokens, up to a place from which they are wrong."""

    def __init__(self, core: Scheduler, wanted: dict[int, list[int]]) -> None:
        self._core = core
        self._wanted = wanted  # by length of prompt
        self._number = 0

    def propose(self) -> Drafts:
        """See `Drafter`."""
        found = {}
        for sequence in self._core.internal_state.running.sequences:
            assert sequence.slot is not None
            known = int(self._core.view.num_tokens(sequence)) - sequence.num_prompt
            tokens = self._wanted[sequence.num_prompt][known : known + DRAFTED]
            self._number += 1
            right = self._number % (DRAFTED + 1)
            drafts = tokens[:right] + [(token + 1) % VOCAB_SIZE for token in tokens[right:]]
            found[sequence.slot] = np.array(drafts, dtype=np.int32)
        return found

    def stepped(self, step: AnsweredStep) -> None:
        """See `Drafter`."""


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron_h", "lfm2"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    sizes = {"max_position_embeddings": 160}
    folder: Path = write(request.param, tmp_path_factory.mktemp("drafted") / request.param, sizes)
    with serving(CONFIG, folder) as running:
        yield running


@pytest.mark.parametrize("minor", [3, 4])
def test_a_scheduler_that_does_not_keep_drafts_from_snapshots_is_told_of_none(
    worker: Worker, minor: int
) -> None:
    epoch = worker.describe().epoch + 1
    attachment = Attachment(worker.channel, epoch, protocol_minor=minor)
    told = attachment.receive_description()
    attachment.close()
    assert told.has_states and told.verifies_drafts == (minor >= MINOR_WITH_DRAFTS_OF_STATES)
    without = problem_with_worker(SpeculationOptions(Method.NGRAM), told)
    assert ("verifies no drafts" in without) == (minor < MINOR_WITH_DRAFTS_OF_STATES)


async def test_drafts_and_the_cache_change_no_token_whatever_the_length(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(EDGES[-1])

    async def each(engine: Engine, stub: Any) -> list[list[int]]:
        few = asyncio.Semaphore(3)  # with more rows at once no draft has room

        async def one(length: int) -> list[int]:
            async with few:
                return await generate(stub, prompt[:length], NUM_TOKENS)

        return list(await asyncio.gather(*map(one, EDGES)))

    wanted, _ = await test_served.under_a_scheduler(worker, each, enable_prefix_caching=False)
    by_length = dict(zip(EDGES, wanted, strict=True))
    monkeypatch.setattr(stepping, "make_drafter", lambda _, core: Foresight(core, by_length))
    options = SpeculationOptions(Method.NGRAM)
    found, engine = await test_served.under_a_scheduler(worker, each, speculative_config=options)
    assert found == wanted
    core = engine.groups[0].core
    assert core.counters.prefix_hit_tokens > 5 * len(EDGES)
    assert core.counters.num_drafts > len(EDGES)
    assert 0 < core.counters.num_accepted_tokens < core.counters.num_drafted_tokens
    check_invariants(core)
