"""Gives damaged and forged recordings to the replay, which must refuse them with its own errors.

It runs in a process of its own, with limits of time and memory: a forged recording may ask for any
amount of work.
"""

import asyncio
import random
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from scheduler_svc.journal import records, segments
from scheduler_svc.journal.calls import UnknownCall
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.records import Damaged
from scheduler_svc.journal.replay import replay
from scheduler_svc.journal.values import BadValues
from tests.e2e.fuzz.case import Case, CaseVerdict
from tests.e2e.fuzz.json_bodies import change_bytes
from tests.e2e.fuzz.proto_messages import mutate

PATIENCE_S = 60.0
MAX_MEMORY_BYTES = 4 << 30
MAX_RECORDS = 40
REFUSALS = (NotReplayable, Damaged, BadValues, UnknownCall, OSError)


class RecordingTarget:
    """Changed copies of one recording."""

    name = "recordings"

    def __init__(self, recorded: Path) -> None:
        first = segments.segment_path(recorded, segments.numbers(recorded)[0])
        self._records = [stored.record for stored in records.read(first)][:MAX_RECORDS]
        self._pool = _pool()

    def draw(self, rng: random.Random) -> Case:
        """The beginning of the recording, with some records changed and sealed again."""
        kept = [type(one).FromString(one.SerializeToString()) for one in self._records]
        kept = kept[: rng.randrange(1, len(kept) + 1)]
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate(rng.choice(kept), rng)
        if rng.random() < 0.1:
            rng.shuffle(kept)
        payload = b"".join(map(records.pack, kept))
        return Case(
            self.name, "replay", change_bytes(payload, rng) if rng.random() < 0.2 else payload
        )

    async def run(self, case: Case) -> CaseVerdict:
        """Replays the case."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                status, problem = await loop.run_in_executor(self._pool, _replayed, case.payload)
        except (TimeoutError, BrokenProcessPool) as error:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(wait=False)
            self._pool = _pool()
            return CaseVerdict(type(error).__name__, "the replay hung or ended")
        return CaseVerdict(status, problem)

    async def close(self) -> None:
        """Ends the helper process."""
        self._pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_limit)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _replayed(payload: bytes) -> tuple[str, str]:
    """The end of the replay, and the problem with it, if any."""
    with tempfile.TemporaryDirectory() as scratch:
        segments.segment_path(Path(scratch), 1).write_bytes(payload)
        try:
            report = replay(Recording(Path(scratch)))
        except REFUSALS as error:
            return type(error).__name__, "" if str(error) else "a refusal without a word"
        except (Exception, MemoryError) as error:
            return type(error).__name__, f"{type(error).__name__}: {str(error)[:200]}"
    return "diverged" if report.divergence else "equal", ""
