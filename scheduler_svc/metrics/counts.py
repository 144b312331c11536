"""Counts what passes through the scheduler's shell: an addition or two per step or end."""

import time
from dataclasses import dataclass

import grpc

from scheduler_svc.core import Finished, StepPlan
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.metrics import declared
from scheduler_svc.metrics.declared import DECODE, MIXED, PREFILL, RELEASE, outcome_of, phase_label
from wire.metrics.book import Book

OTHER_TENANTS = "_other"  # a name of its own: tenants' names have no leading underscore by default
# Each request has been queued, even for no time; the other phases count where there was one.
_ALWAYS = Phase.QUEUE


@dataclass(slots=True)
class TenantCounts:
    """Requests and tokens of one tenant."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class SchedulerCounts:
    """The cells of this process. Belongs to the event loop's thread."""

    def __init__(self, max_tenants: int = 0, book: Book | None = None) -> None:
        self.book = book or Book(declared.OWN)
        self.row = self.book.new_row()
        self.tenants: dict[str, TenantCounts] = {}  # by name; those that came too late are one
        self._max_tenants = max_tenants
        book, row = self.book, self.row
        self._outcomes = book.cells(declared.REQUESTS)
        self._refusals = book.cells(declared.REFUSALS)
        self._e2e = book.buckets(row, declared.E2E)
        self._phases = {
            phase: book.buckets(row, declared.PHASES, phase_label(phase)) for phase in Phase
        }
        self._steps = {
            kind: book.buckets(row, declared.STEPS, kind) for kind in declared.STEP_KINDS
        }
        self._step_tokens = book.cells(declared.STEP_TOKENS)
        self.step_sizes = book.buckets(row, declared.STEP_SIZES)
        self._grants_at = book.at(declared.GRANTS)
        self._granted_steps_at = book.at(declared.GRANTED_STEPS)
        self._cuts_at, self._skipped_at = book.at(declared.CUTS), book.at(declared.SKIPPED_STEPS)

    def ended(self, end: Finished) -> None:
        """Counts the end of a request."""
        self.row[self._outcomes[outcome_of(end.reason)]] += 1
        now_s = time.monotonic()
        self._e2e.observe(max(now_s - end.request.arrival_s, 0.0))
        if end.timeline is not None:
            for phase, spent_s in end.timeline.spent_s(now_s).items():
                if spent_s > 0 or phase is _ALWAYS:
                    self._phases[phase].observe(spent_s)
        if self._max_tenants:
            tenant = self._tenant(end.request.tenant)
            tenant.num_requests += 1
            tenant.num_prompt_tokens += end.num_prompt_tokens
            tenant.num_output_tokens += end.num_output_tokens

    def _tenant(self, name: str) -> TenantCounts:
        if name not in self.tenants and len(self.tenants) >= self._max_tenants:
            name = OTHER_TENANTS
        return self.tenants.setdefault(name, TenantCounts())

    def refused(self, code: grpc.StatusCode) -> None:
        """Counts a request that was not accepted."""
        self.row[self._refusals[code.name]] += 1

    def sent(self, num_granted: int) -> None:
        """Counts a frame that grants so many steps; 0: it is a single step."""
        if num_granted:
            self.row[self._grants_at] += 1
            self.row[self._granted_steps_at] += num_granted

    def cut(self) -> None:
        """Counts a cut that was asked for."""
        self.row[self._cuts_at] += 1

    def skipped(self, num_steps: int) -> None:
        """Counts granted steps that the worker left out."""
        self.row[self._skipped_at] += num_steps

    def stepped(self, plan: StepPlan, duration_s: float) -> None:
        """Counts a step whose result was applied."""
        num_tokens, num_prefill = plan.num_tokens, plan.num_prefill_tokens
        kind = DECODE
        if not num_tokens:
            kind = RELEASE
        elif num_prefill:
            kind = PREFILL if num_prefill == num_tokens else MIXED
        self._steps[kind].observe(duration_s)
        self.row[self._step_tokens[kind]] += num_tokens
        if num_tokens:
            self.step_sizes.observe(num_tokens)
