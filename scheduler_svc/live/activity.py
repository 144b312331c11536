"""The activity of one worker group, message by message, for one watcher.

The rows of 256 running requests cost a few vector operations: facts and numbers of requests are
collected only when the running set has changed.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import live_pb2
from scheduler_svc.core import Scheduler, Sequence
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.explain.trace import StepRecord, Trace
from scheduler_svc.group import WorkerGroup
from wire.columns import UINT8, UINT32, pack

MAX_BARS = 32
PHASES = {
    Phase.QUEUE: live_pb2.LIVE_PHASE_QUEUE,
    Phase.PREPARING: live_pb2.LIVE_PHASE_GRAMMAR,
    Phase.KV: live_pb2.LIVE_PHASE_KV,
    Phase.PREFILL: live_pb2.LIVE_PHASE_PREFILL,
    Phase.DECODE: live_pb2.LIVE_PHASE_DECODE,
    Phase.PREEMPTED: live_pb2.LIVE_PHASE_PREEMPTED,
    Phase.WORKER_AWAY: live_pb2.LIVE_PHASE_WORKER_AWAY,
}
_NONE: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class GroupWatch:
    """One watcher's eye on a group: it knows what the watcher has been told."""

    def __init__(self, group: WorkerGroup, max_cells: int, max_requests: int) -> None:
        self.group = group
        self._max_cells = max_cells
        self._requests = RequestWatch(max_requests)
        self._last_step_id = _last_done(group.trace)

    def look(self, core: Scheduler) -> live_pb2.GroupActivity:
        """The present state, and what was done since the last call."""
        shares = core.view.block_shares(self._max_cells)
        return live_pb2.GroupActivity(
            address=self.group.address,
            blocks=live_pb2.BlockMap(
                num_blocks=shares.num_blocks,
                blocks_per_cell=shares.blocks_per_cell,
                cells=shares.cells.tobytes(),
            ),
            requests=self._requests.look(core),
            steps=self._new_steps(),
        )

    def _new_steps(self) -> list[live_pb2.StepBar]:
        done: list[StepRecord] = []
        for record in self.group.trace.newest_first():
            if record.plan.step_id <= self._last_step_id:
                break
            if record.duration_s is not None:
                done.append(record)
        if done:
            self._last_step_id = done[0].plan.step_id
        return step_bars(done[::-1])


def _last_done(trace: Trace) -> int:
    done = (r.plan.step_id for r in trace.newest_first() if r.duration_s is not None)
    return next(done, 0)


def step_bars(records: list[StepRecord]) -> list[live_pb2.StepBar]:
    """At most MAX_BARS bars of steps that are done, oldest first."""
    per_bar = -(-len(records) // MAX_BARS)
    starts = range(0, len(records), per_bar) if records else ()
    return [_bar(records[start : start + per_bar]) for start in starts]


def _bar(records: list[StepRecord]) -> live_pb2.StepBar:
    num_tokens = sum(record.plan.num_tokens for record in records)
    num_prefill = sum(record.plan.num_prefill_tokens for record in records)
    return live_pb2.StepBar(
        step_id=records[-1].plan.step_id,
        num_steps=len(records),
        num_prefill_tokens=num_prefill,
        num_decode_tokens=num_tokens - num_prefill,
        num_rows=max(len(record.plan.slots) for record in records),
        duration_us=int(sum(record.duration_s or 0.0 for record in records) * 1e6),
    )


class RequestWatch:
    """The live requests of one core, and which of them the watcher knows."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._running: tuple[Sequence, ...] = ()
        self._numbers: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)  # of those
        self._told: dict[int, bool] = {}  # by number: whether it had run when it was told

    def look(self, core: Scheduler) -> live_pb2.LiveRequests:
        """The requests now."""
        view, running = core.view, core.view.running
        num_shown = min(len(running), self._max_requests)
        waiting = list(islice(view.waiting, self._max_requests - num_shown))
        # While the set is the same, so are its numbers. Compared as an object: it is never changed.
        has_changed = running is not self._running
        if has_changed:
            self._running = running
            shown = running[:num_shown]
            self._numbers = np.array([s.number for s in shown], dtype=np.uint32)
        slots = view.running_slots()[:num_shown]
        phases = np.where(
            view.is_prefilling[slots], PHASES[Phase.PREFILL], PHASES[Phase.DECODE]
        ).tolist() + [PHASES[sequence.timeline.phase] for sequence in waiting]
        numbers = self._numbers.tolist() + [sequence.number for sequence in waiting]
        sizes = [len(sequence.token_ids) for sequence in waiting]
        zeros = np.zeros(len(waiting), dtype=np.int32)
        return live_pb2.LiveRequests(
            numbers=pack(numbers, UINT32),
            phases=pack(phases, UINT8),
            num_tokens=pack(_joined(view.num_known[slots], sizes)),
            num_computed_tokens=pack(_joined(view.num_computed[slots], zeros)),
            num_blocks=pack(_joined(view.num_blocks_by_slot[slots], zeros)),
            facts=self._facts([*(running[:num_shown] if has_changed else ()), *waiting], numbers),
            total=core.num_running + core.num_waiting,
        )

    def _facts(
        self, looked_at: Iterable[Sequence], numbers: list[int]
    ) -> Iterator[live_pb2.LiveRequest]:
        """Facts that the watcher does not know yet; `numbers` are of all that it is shown now."""
        now_s, told = time.monotonic(), self._told
        for sequence in looked_at:
            if told.get(sequence.number) == sequence.has_run:
                continue
            told[sequence.number] = sequence.has_run
            yield live_pb2.LiveRequest(
                number=sequence.number,
                request_id=sequence.request.request_id,
                tenant=sequence.request.tenant,
                num_prompt_tokens=sequence.num_prompt,
                num_cached_tokens=sequence.num_cached,
                age_s=sequence.timeline.age_s(now_s),
            )
        if len(told) > 2 * max(len(numbers), 64):
            self._told = {number: told[number] for number in numbers if number in told}


def _joined(
    running: NDArray[np.int32], waiting: "NDArray[np.int32] | list[int]"
) -> NDArray[np.int32]:
    return np.concatenate((running, np.asarray(waiting, dtype=np.int32)))
