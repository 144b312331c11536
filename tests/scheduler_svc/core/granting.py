"""A simulation whose worker computes granted steps at chosen times and applies cuts."""

import random
from collections import deque

from scheduler_svc.core import Cut, Drafts, SchedulerConfig, StepPlan
from scheduler_svc.core.step.plan import NO_DRAFTS
from tests.scheduler_svc.core.simulation import Simulation, check_limit


class Granting(Simulation):
    """A worker that computes granted steps when called, and skips steps that are cut."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.not_begun: deque[StepPlan] = deque()
        self.num_granted = self.num_skipped = 0

    def grant(self, max_steps: int) -> tuple[StepPlan, ...]:
        in_flight = list(self.scheduler._in_flight)
        plans = self.scheduler.grant(max_steps)
        if plans:
            self._check_plan(plans[0], in_flight)
            assert not any(plan.new_sequences or plan.reset for plan in plans)
        self.not_begun.extend(plans)
        self.num_granted += len(plans)
        self.check()
        return plans

    def begin(self) -> None:
        """Computes one granted step."""
        self.results.append(self.worker.execute(self.not_begun.popleft()))

    def schedule(
        self, most_prompt_tokens: int | None = None, drafts: Drafts = NO_DRAFTS
    ) -> StepPlan | None:
        in_flight = list(self.scheduler._in_flight)
        plan = self.scheduler.schedule(most_prompt_tokens, drafts)
        if plan is not None:
            check_limit(plan, most_prompt_tokens)
            self._check_plan(plan, in_flight)
            while self.not_begun:  # steps keep their order
                self.begin()
            self.results.append(self.worker.execute(plan))
        self.check()
        return plan

    def update(self, bad_rows: tuple[int, ...] = ()) -> None:
        if not self.results:
            self.begin()
        super().update(bad_rows)

    def cut(self, num_kept: int = 0) -> bool:
        """Asks for a cut; the worker answers at once."""
        cut = self.scheduler.cut(num_kept)
        if cut is None:
            return False
        assert self.scheduler.schedule() is None and not self.scheduler.grant(8)
        self.skip(self.leave_out(cut), cut)
        return True

    def leave_out(self, cut: Cut) -> int:
        """Applies a cut at the worker; returns the first step that it skips."""
        first = next(
            (p.step_id for p in self.not_begun if p.step_id >= cut.first_step_id),
            cut.last_step_id + 1,
        )
        while self.not_begun and self.not_begun[-1].step_id >= first:
            self.not_begun.pop()
        self._apply_skipped(first)
        return first

    def skip(self, first: int, cut: Cut) -> None:
        """Delivers the worker's answer to the scheduler."""
        self.num_skipped += self.scheduler.skip(first, cut.last_step_id)
        self.check()

    def _apply_skipped(self, first: int) -> None:
        for plan in list(self.scheduler._in_flight):
            if plan.step_id >= first:
                while self.not_begun:  # a later frame's changes apply after the steps before it
                    self.begin()
                self.worker._apply_changes(plan)
                self.worker.last_step_id = plan.step_id
                self.worker._previous_rows = []

    def send_worker_away(self, is_death: bool = False) -> None:
        self.not_begun.clear()
        super().send_worker_away(is_death)

    def serve(self, max_steps: int, lookahead: int, rng: random.Random) -> None:
        """Serves with grants as the shell does, with a worker that begins steps at random times."""
        if not self.cut(lookahead):
            if self.scheduler.num_in_flight <= max(lookahead, max_steps // 2):
                self.grant(max_steps)
            if self.scheduler.num_in_flight <= lookahead:
                self.schedule()
        while self.not_begun and rng.random() < 0.4:
            self.begin()
        if self.scheduler.num_in_flight:
            self.update()

    def finish(self, max_steps: int, lookahead: int, rng: random.Random) -> None:
        for _ in range(5000):
            if not self.live and not self.scheduler.num_in_flight:
                return
            self.serve(max_steps, lookahead, rng)
        raise AssertionError(f"{self.live} still run")
