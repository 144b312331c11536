"""Recorded schedulers that experience every event of the random walks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagewire.v1 import worker_pb2
from pagewire.v1.journal_pb2 import JournalHeader
from scheduler_svc.core import Refused, SchedulerConfig, Sequence
from scheduler_svc.journal import values
from scheduler_svc.journal.calls import TappedScheduler
from scheduler_svc.journal.mask import Mask
from scheduler_svc.journal.recorder import Recorder, RecordingLimits
from scheduler_svc.journal.recording import FORMAT_VERSION, core_sha256
from scheduler_svc.sampling import Sampling
from tests.scheduler_svc.core import (
    rules_of_clients,
    rules_of_drafts,
    rules_of_requirements,
    rules_of_workers,
)
from tests.scheduler_svc.core.draws import SeededDraw
from tests.scheduler_svc.core.world import RULES, World, draw_config

# Imported to register the rules.
assert rules_of_clients and rules_of_drafts and rules_of_requirements and rules_of_workers
KEY = bytes(range(16))
MIB = 1 << 20


class RecordedWorld(World):
    """A world whose scheduler reports its calls to a recorder."""

    def __init__(self, config: SchedulerConfig, max_depth: int, tap: Any) -> None:
        super().__init__(config, max_depth)
        self.scheduler = TappedScheduler(config, tap)

    def submit(self, prompt: list[int], **fields: object) -> Sequence | None:
        return super().submit(prompt, sampling=Sampling(0.0, 1.0, 0, 0.0, seed=1), **fields)

    def check(self, **how: object) -> None:
        """Does nothing: the random walks of the core check the state, which takes too long here."""

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Does nothing: a recorded scheduler cannot be pickled."""
        yield


def header_for(config: SchedulerConfig, mask: Mask | None) -> JournalHeader:
    return JournalHeader(
        format_version=FORMAT_VERSION,
        core_sha256=core_sha256(),
        config=values.encode(config if mask is None else mask.config(config)),
        worker=worker_pb2.WorkerDescription(num_blocks=config.num_blocks),
        prompts_replaced=mask is not None,
    )


class Run:
    """A scheduler from start to end, its recording, and its final state."""

    def __init__(
        self, folder: Path, seed: str, *, is_masked: bool, max_bytes: int = 64 * MIB
    ) -> None:
        draw = SeededDraw(seed)
        config, max_depth = draw_config(draw), draw.integer(0, 3)
        mask = Mask(config.vocab_size, config.max_num_seqs, KEY) if is_masked else None
        limits = RecordingLimits(max_bytes)
        self.folder = folder
        self.recorder = Recorder(folder, header_for(config, mask), mask, limits)
        self.calls: list[str] = []
        self.world = RecordedWorld(config, max_depth, self._tap)
        self._draw = draw

    def _tap(self, name: str, arguments: Any, answer: Any, refused: Refused | None) -> None:
        self.calls.append(name)
        self.recorder.tap(name, arguments, answer, refused)

    def act(self, num_actions: int) -> None:
        """Runs `num_actions` rules, drawn by their weights; the seed alone decides which.

        Rules are registered in the order of imports, which depends on the tests that run before.
        """
        rules = [RULES[name] for name in sorted(RULES)]
        for _ in range(num_actions):
            possible = [rule for rule in rules if rule.is_possible(self.world)]
            rule = self._draw.weighted(possible, [rule.weight for rule in possible])
            rule.apply(self.world, self._draw)

    def close(self) -> None:
        """Closes the recording and checks that it did not fail."""
        self.recorder.close()
        assert self.recorder.why_stopped == ""
