"""Forecasts admission and completion times by running a copy of the scheduler's counters forward.

It copies numbers, not sequences: blocks, slots, and the tokens that each sequence has left. Between
two events (an end, an admission) all steps are alike, so their time is a multiplication. Prefix
hits and preemptions are not predicted; a sequence is assumed to hold throughout the blocks that it
holds half-way.
"""

import heapq
import math
from dataclasses import dataclass

from scheduler_svc.core.estimate.step_time import StepTime
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.sequence import Sequence
from scheduler_svc.core.scheduler import Scheduler

MAX_FORESEEN = 2048  # waiting sequences simulated; after these the mean pace is assumed


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times, in seconds from now."""

    admissions_s: list[float]  # per waiting sequence, in order
    drained_s: float  # until every live sequence has ended

    def nth_admission_s(self, number: int) -> float:
        """Time of the `number`-th admission from now (1 is the next), in seconds.

        Beyond the simulated ones it extrapolates at their mean pace.
        """
        if number <= len(self.admissions_s):
            return self.admissions_s[number - 1]
        pace_s = self.drained_s / max(len(self.admissions_s), 1)
        return self.drained_s + pace_s * (number - len(self.admissions_s) - 1)


class _Run:
    """Simulated state: time, last decode step per running sequence, free slots and blocks."""

    def __init__(self, scheduler: Scheduler, step_time: StepTime) -> None:
        state = scheduler.internal_state
        self._config: SchedulerConfig = scheduler.config
        self._step_time = step_time
        self._expected = scheduler.output_lengths
        self.now_s = 0.0
        self._num_steps = 0
        self._num_context = 0
        self._ends: list[tuple[int, int, int]] = []  # (step, blocks held, tokens at the end)
        self._free_slots = state.num_coming_slots
        self._free_blocks = state.num_coming_blocks
        self._usable_blocks = state.pool.num_usable
        table, unfinished = state.table, 0
        for sequence in state.running.sequences:
            slot = sequence.slot
            assert slot is not None
            known, computed = int(table.num_tokens[slot]), int(table.num_computed[slot])
            unfinished += max(known - computed - 1, 0)
            self._start(sequence, known, table.num_held(slot))
        self._prefill(unfinished)

    def admit(self, sequence: Sequence) -> None:
        """Runs until there is room for a waiting sequence, then computes its prompt."""
        num_tokens = len(sequence.token_ids)
        half_way = num_tokens + self._expected.left(sequence, num_tokens) // 2
        need = min(self._config.blocks_needed(half_way + 1), self._usable_blocks)
        while self._ends and (not self._free_slots or need > self._free_blocks):
            self._finish_next()
        self._free_slots -= 1
        self._free_blocks -= need
        self._start(sequence, num_tokens, need)
        self._prefill(num_tokens)

    def drain(self) -> None:
        """Runs until every sequence has ended."""
        while self._ends:
            self._finish_next()

    def _start(self, sequence: Sequence, num_tokens: int, num_blocks: int) -> None:
        left = self._expected.left(sequence, num_tokens)
        heapq.heappush(self._ends, (self._num_steps + left, num_blocks, num_tokens + left))
        self._num_context += num_tokens

    def _finish_next(self) -> None:
        """Runs all steps until the next sequence ends, and ends it."""
        step, num_blocks, num_tokens = heapq.heappop(self._ends)
        self._decode(step - self._num_steps, len(self._ends) + 1)
        self._num_context -= num_tokens
        self._free_slots += 1
        self._free_blocks += num_blocks

    def _decode(self, num_steps: int, num_rows: int) -> None:
        if num_steps <= 0:
            return
        context = self._num_context + num_rows * (num_steps - 1) / 2  # average per step
        self.now_s += num_steps * self._step_time.of(num_rows, context)
        self._num_steps += num_steps
        self._num_context += num_rows * num_steps

    def _prefill(self, num_tokens: int) -> None:
        """Adds a prompt's time: its tokens join decode steps; the rest takes extra steps."""
        num_rows = len(self._ends)
        room = max(self._config.max_num_batched_tokens - num_rows, 1)
        self.now_s += self._step_time.per_token_s * num_tokens
        self._decode(math.floor(num_tokens / room), num_rows)


def forecast(scheduler: Scheduler, step_time: StepTime) -> Forecast:
    """Forecasts when each waiting sequence is admitted and when every live one has ended."""
    run = _Run(scheduler, step_time)
    admissions_s: list[float] = []
    num_waiting = scheduler.num_waiting
    for sequence in scheduler.internal_state.waiting:
        if len(admissions_s) == MAX_FORESEEN:
            break
        run.admit(sequence)
        admissions_s.append(run.now_s)
    run.drain()
    unseen = num_waiting - len(admissions_s)
    pace_s = run.now_s / max(len(admissions_s), 1)
    return Forecast(admissions_s, run.now_s + unseen * pace_s)
