"""Drives one link: how far to plan ahead, what to send, and how to apply an answer.

While only decoding is to be done, several steps are granted at a time, so that the worker has its
next steps before it has finished the last, whatever the latency. A change cuts them short.
"""

import time

from pagewire.v1 import worker_pb2
from scheduler_svc.clients.registry import Clients
from scheduler_svc.config import ServiceConfig
from scheduler_svc.convert import (
    to_logprobs,
    to_preparations,
    to_prompt_outputs,
    to_result,
    to_state,
    to_step,
)
from scheduler_svc.core import OutOfStep, Scheduler, StepOutputs, StepPlan
from scheduler_svc.core.request.fault import RequestFault
from scheduler_svc.core.step.plan import NO_DRAFTS
from scheduler_svc.explain.first_tokens import FirstTokenStep
from scheduler_svc.explain.trace import StepRecord, Trace
from scheduler_svc.observe.step_log import log_step
from scheduler_svc.observe.step_profile import LoopProfile
from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.start import make_drafter
from scheduler_svc.transfers import TransferTraffic
from scheduler_svc.worker.link import Answer, LinkLost, WorkerLink
from scheduler_svc.worker.pace import Pace
from scheduler_svc.worker.state_check import StateCheck, StateDiffers
from wire.columns import BadColumn
from wire.deaths import PeerLoss
from wire.logprobs import LogprobColumns
from wire.prompt_outputs import PromptOutput


class Stepping:
    """One core and one stream, from the handshake to the end of the stream."""

    def __init__(
        self,
        config: ServiceConfig,
        core: Scheduler,
        link: WorkerLink,
        clients: Clients,
        trace: Trace,
        pace: Pace,
    ) -> None:
        worker = link.attached.description
        self._core = core
        self._link = link
        self._clients = clients
        self._trace = trace
        self._pace = pace
        self._lookahead = config.lookahead
        self._logs_steps = config.log_steps
        self._max_grant = min(config.max_grant, worker.max_granted_steps)
        interval = config.state_check_interval if worker.has_state_hashes else 0
        self.state_check = StateCheck(core, interval)
        speculation = config.speculative_config
        self._drafter = None if speculation is None else make_drafter(speculation, core)
        self.transfers: TransferTraffic | None = None  # to and from a tier, if there is one
        self._last_received_s: float | None = None  # the answer to a step with rows

    @property
    def awaits_answer(self) -> bool:
        """True if a step or a cut awaits the worker's answer."""
        return bool(self._core.num_in_flight or self._core.is_cutting)

    async def plan_ahead(self) -> None:
        """Sends the steps that the worker should have, or a cut of those that it should not."""
        core = self._core
        await self._prepare()
        cut = core.cut(self._lookahead)
        if cut is not None:
            self._clients.counts.cut()
            await self._link.cut(cut.first_step_id, cut.last_step_id)
            return
        while steps := self._next_steps():
            await self._send(steps)
        if not self.awaits_answer and (plan := core.release()) is not None:
            await self._send((plan,))
        if self.transfers is not None:
            await self.transfers.send()
        # What was prepared on a lost worker is asked for again at the sequence's turn: with no step
        # in flight, no answer would bring this about.
        await self._prepare()

    async def _prepare(self) -> None:
        """Asks the worker for what it should prepare now."""
        if (preparations := self._core.take_preparations()) is not None:
            kinds = self._core.config.prepared_kinds
            await self._link.prepare(to_preparations(preparations, kinds))

    async def _send(self, steps: tuple[StepPlan, ...]) -> None:
        """Sends one frame: a step, or all steps of a grant."""
        now_s, first = time.monotonic(), steps[0]
        for plan in steps:
            self._trace.sent(plan, now_s)
        self._clients.tell_admitted(first)
        granted = len(steps) if first.grant_id is not None else 0
        self._clients.counts.sent(granted)
        await self._link.send(self._encode(first, granted))

    def _encode(self, first: StepPlan, granted: int) -> worker_pb2.SchedulerOutput:
        """The message of a frame whose first step this is."""
        return to_step(first, granted, self.state_check.wants(first), self._clients.spans.contexts)

    def apply(self, answer: Answer) -> bool:
        """Applies an answer; True if a step is done. Raises LinkLost when it does not fit."""
        try:
            if isinstance(answer, worker_pb2.Skipped):
                self._skip(answer)
                return False
            self._update(answer)
        except (BadColumn, OutOfStep, StateDiffers) as error:
            # The core is unchanged: recovery repeats everything since.
            step = (
                f"step {answer.step_id}: "
                if isinstance(answer, worker_pb2.ModelRunnerOutput)
                else ""
            )
            raise LinkLost(f"{step}{error}", self._link.loss_by_answer) from error
        return True

    def _next_steps(self) -> tuple[StepPlan, ...]:
        """A grant if possible, else one step if the look-ahead allows it; empty if neither."""
        core, num_in_flight = self._core, self._core.num_in_flight
        drafts = NO_DRAFTS if self._drafter is None else self._drafter.propose()
        if drafts is None:
            return ()
        num_steps = self._pace.steps_to_grant(self._max_grant)
        # The next grant follows when half of one is left, so that the worker never waits for it.
        most = max(self._lookahead, num_steps // 2) if self._lookahead else 0
        may_grant = num_steps > 1 and num_in_flight <= most and not drafts
        if may_grant and (steps := core.grant(num_steps)):
            return steps
        plan = None
        if num_in_flight <= self._lookahead:
            plan = core.schedule(self._pace.prompts.most_prompt_tokens, drafts)
        return () if plan is None else (plan,)

    def _update(self, output: worker_pb2.ModelRunnerOutput) -> None:
        if output.error:
            raise LinkLost(f"step {output.step_id} failed: {output.error}", PeerLoss.DEATH)
        oldest = self._core.oldest_in_flight
        if oldest is None or oldest.step_id != output.step_id:  # before comparing its state
            expected = "none" if oldest is None else oldest.step_id
            raise OutOfStep(f"result of step {output.step_id}, expected {expected}")
        received_s, first_ids = time.monotonic(), self._first_token_ids(oldest)
        logprobs, prompt_outputs = to_logprobs(output), to_prompt_outputs(output)
        result = to_result(output, prompt_outputs)
        self.state_check.compare(output.step_id, to_state(output))
        outputs = self._core.update(result)
        applied_s = time.monotonic()  # before delivery: the gateway may have the token during it
        self._deliver(oldest, outputs, logprobs, prompt_outputs)
        record = self._note_done(output.step_id)
        if first_ids:
            step = FirstTokenStep.of(
                record.plan, record.sent_s, received_s, applied_s, output.timings
            )
            self._trace.first_tokens.note(first_ids, step)
        self._clients.counts.stepped(record.plan, record.duration_s or 0.0)
        if self._logs_steps:
            log_step(record, self._core)
        if len(record.plan.slots):  # else it took no time that a step of tokens takes
            self._pace.stepped(record.plan, record.sent_s, self._core.now_s)
            self._tell_drafter(record, received_s, len(outputs.token_ids))

    def _tell_drafter(self, record: StepRecord, received_s: float, num_tokens: int) -> None:
        if self._drafter is None:
            return
        duration_s, before_s = record.duration_s or 0.0, self._last_received_s
        self._last_received_s = received_s
        period_s = duration_s if before_s is None else received_s - before_s
        self._drafter.stepped(AnsweredStep(record.plan, duration_s, period_s, num_tokens))

    def _note_done(self, step_id: int) -> StepRecord:
        return self._trace.done(step_id, time.monotonic())

    def _first_token_ids(self, plan: StepPlan) -> list[str]:
        """Ids of the requests whose first token the step makes; asked before it is applied."""
        if not plan.num_prefill_tokens:
            return []
        view, sampled = self._core.view, plan.sampled_slots
        found = map(view.sequence_in, sampled[view.is_prefilling[sampled]].tolist())
        return [
            sequence.request.request_id
            for sequence in found
            if sequence is not None and view.num_tokens(sequence) == sequence.num_prompt
        ]

    def _deliver(
        self,
        plan: StepPlan,
        outputs: StepOutputs,
        logprobs: LogprobColumns | None,
        prompt_outputs: list[PromptOutput],
    ) -> None:
        """Delivers a step's outputs. Raises RequestFault naming the requests that missed theirs."""
        try:
            self._clients.deliver(outputs, logprobs, prompt_outputs)
        except RequestFault:
            raise
        except Exception as error:  # the core has counted tokens that some client did not get
            ids = [sequence.request.request_id for sequence in plan.sequences()]
            raise RequestFault(*ids) from error

    def _skip(self, skipped: worker_pb2.Skipped) -> None:
        num_skipped = self._core.skip(skipped.first_step_id, skipped.last_step_id)
        self._clients.counts.skipped(num_skipped)
        self.state_check.skipped(skipped.first_step_id)
        self._trace.skipped(skipped.first_step_id)


class ProfiledStepping(Stepping):
    """The same core and stream, for as long as what the loop does is recorded."""

    def __init__(self, plain: Stepping, profile: LoopProfile) -> None:
        # Not a new start: all that the plain one refers to.
        vars(self).update(vars(plain))
        self._profile = profile
        self._received_ns = 0

    def _next_steps(self) -> tuple[StepPlan, ...]:
        with self._profile.timed("plan") as interval:
            steps = super()._next_steps()
            if steps:
                interval.step_id = steps[0].step_id
        return steps

    def _encode(self, first: StepPlan, granted: int) -> worker_pb2.SchedulerOutput:
        with self._profile.timed("encode", first.step_id):
            return super()._encode(first, granted)

    def _update(self, output: worker_pb2.ModelRunnerOutput) -> None:
        self._received_ns = time.monotonic_ns()
        with self._profile.timed("apply", output.step_id):
            super()._update(output)

    def _deliver(
        self,
        plan: StepPlan,
        outputs: StepOutputs,
        logprobs: LogprobColumns | None,
        prompt_outputs: list[PromptOutput],
    ) -> None:
        with self._profile.timed("answer", plan.step_id):
            super()._deliver(plan, outputs, logprobs, prompt_outputs)

    def _note_done(self, step_id: int) -> StepRecord:
        record = super()._note_done(step_id)
        self._profile.step_done(record, self._received_ns)
        return record
