"""The scheduler: events in, plans and tokens out. No IO, no clock, no randomness, one thread.

    add(request)  abort(id)  expire(now)  worker_lost()
         |            |           |            |
         v            v           v            v
    +--------------------------------------+
    |  Scheduler                           |--> schedule() -> StepPlan   (to the worker)
    |  waiting | slots | blocks | fence    |<-- update(StepResult) -> StepOutputs (to clients)
    +--------------------------------------+

The same calls in the same order always give the same plans. `schedule` may be called again before
the previous result is known; results come in the order of the plans.
"""

from collections import deque
from collections.abc import Iterable

from scheduler_svc.core.history.losses import LostSteps, clear_suspects, hopeless_ends
from scheduler_svc.core.history.migration import Migration
from scheduler_svc.core.history.output_lengths import OutputLengths
from scheduler_svc.core.history.recent import Recent
from scheduler_svc.core.history.rescue import Unfinished, rescue
from scheduler_svc.core.kv.cache_changes import Change
from scheduler_svc.core.queue.deadlines import Deadlines, expiry_of
from scheduler_svc.core.queue.intake import Intake
from scheduler_svc.core.queue.requirement_waits import Preparations
from scheduler_svc.core.request.config import SchedulerConfig
from scheduler_svc.core.request.fault import blaming
from scheduler_svc.core.request.request import FinishReason, Request
from scheduler_svc.core.request.sequence import End, Sequence, Status
from scheduler_svc.core.request.timeline import Phase
from scheduler_svc.core.step import prompt_outputs
from scheduler_svc.core.step.apply_tokens import TokenUpdates
from scheduler_svc.core.step.check_result import check_result
from scheduler_svc.core.step.grants import Cut, Grants
from scheduler_svc.core.step.peer_moves import PeerMoves
from scheduler_svc.core.step.plan import (
    NO_DRAFTS,
    Drafts,
    Finished,
    PromptOutputDelivery,
    StepOutputs,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.step.planner import Planner
from scheduler_svc.core.step.state import SchedulerState, WorkerRoom
from scheduler_svc.core.step.tier_use import store_answer, store_prompts
from scheduler_svc.core.step.transfers import Transfers
from scheduler_svc.core.view import View


class Scheduler:
    """All requests of one worker group."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.internal_state = SchedulerState(config)
        self.view = View(self.internal_state)
        self._planner = Planner(config, self.internal_state)
        self.counters = self._planner.counters
        # A step of decode takes as long as an eighth of one that is full of prompts, or longer.
        self._least_work = config.max_num_batched_tokens // 8
        self._in_flight: deque[StepPlan] = deque()
        self._grants = Grants(self._in_flight, self.internal_state)
        self._token_updates = TokenUpdates(config, self.internal_state)
        self._live: dict[str, Sequence] = {}
        self.intake = Intake(config, self.internal_state.waiting, self.internal_state.fork_groups)
        self.output_lengths = OutputLengths()
        self.recent = Recent()
        self._deadlines = Deadlines()
        self.migration = Migration(self.internal_state, self._live, self._deadlines)
        self.transfers = Transfers(self.internal_state)
        self.peer_moves = PeerMoves(self.internal_state, self._live, self._grants)
        self._unfinished = Unfinished()  # of the call in progress
        self._lost_steps = LostSteps()
        self.num_accepted = 0
        self.num_finished = 0
        self.num_expired = 0
        self.num_output_tokens = 0

    @property
    def now_s(self) -> float:
        """The latest time reported, in seconds; events are recorded at this time."""
        return self.internal_state.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        state = self.internal_state
        state.now_s = max(state.now_s, now_s)
        if state.sessions is not None:
            state.sessions.now_s = state.now_s

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a sequence, fetch or pull, in seconds; None: there is none."""
        all_s = self._deadlines.next_s, self.transfers.next_due_s, self.peer_moves.next_due_s
        return min((due_s for due_s in all_s if due_s is not None), default=None)

    def expire(self, now_s: float) -> list[Finished]:
        """Advances the time; returns the ends of those past their deadline, with their times."""
        self.now_s = now_s
        if self.internal_state.transfers is not None:
            self.transfers.expire()
        self.peer_moves.expire()
        due = self._deadlines.take_due(now_s)
        finished = [self._finish(s, FinishReason.EXPIRED, expiry_of(s, self.now_s)) for s in due]
        if finished:
            self.num_expired += len(finished)
            self._leave()
        return finished

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned whose result has not arrived."""
        return len(self._in_flight)

    @property
    def is_cutting(self) -> bool:
        """True if a cut awaits the worker's answer; no step is planned before it arrives."""
        return self._grants.pending is not None

    @property
    def oldest_in_flight(self) -> StepPlan | None:
        """The step that the next result answers; None when no step is in flight."""
        return self._in_flight[0] if self._in_flight else None

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a slot."""
        return len(self.internal_state.running.sequences)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot, preempted ones included."""
        return len(self.internal_state.waiting)

    @property
    def last_step_id(self) -> int:
        """Id of the last step planned; 0 before the first."""
        return self._planner.last_step_id

    def live(self) -> Iterable[Sequence]:
        """All live sequences, oldest first."""
        return self._live.values()

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Number of a waiting sequence's tokens that the prefix cache holds here."""
        return self._planner.num_cached_tokens(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The live sequence with this request id; None when there is none."""
        return self._live.get(request_id)

    def add(self, request: Request) -> Sequence:
        """Queues a request. Raises Refused, naming the field, if it is invalid or finds no room."""
        self.now_s = request.arrival_s
        state = self.internal_state
        sequence = self.intake.accept(request, self._live, state.pool.num_usable)
        sequence.number = state.next_number()
        with blaming(request.request_id):
            self._live[request.request_id] = sequence
            self.num_accepted += 1
            self._deadlines.add(sequence)
            state.receive(sequence)
        return sequence

    def reserve(self, request: Request, due_s: float) -> None:
        """Reserves a place in the queue at `due_s` for a request that was refused for overload."""
        self.intake.reservations.make(request, due_s)

    def abort(self, request_id: str) -> Finished | None:
        """Ends a request in any state; None when no live request has this id."""
        if (sequence := self._live.get(request_id)) is None:
            return None
        return self._end_from_outside(sequence, FinishReason.ABORT)

    def set_priority(self, request_id: str, priority: int) -> Sequence | None:
        """Changes what PRIORITY goes by; None when no live request has this id."""
        if (sequence := self._live.get(request_id)) is not None:
            self.internal_state.set_priority(sequence, priority)
        return sequence

    def take_preparations(self) -> Preparations | None:
        """Returns what the worker should prepare, or need not any more; None: nothing new.

        The worker answers for each with `prepared`.
        """
        return self.internal_state.requirements.take()

    def prepared(self, preparation_id: int, problem: str = "") -> Finished | None:
        """Queues the request whose requirements are ready, or ends it if one has a problem.

        An answer for a request that has ended has no effect. Returns the end, if it is one.
        """
        state = self.internal_state
        if problem:
            if (failure := state.requirements.failed(preparation_id)) is None:
                return None
            why = f"{failure.requirement.kind.value}: {problem}"
            return self._end_from_outside(failure.sequence, FinishReason.DEAD_END, why)
        if (sequence := state.waiting.is_prepared(preparation_id)) is not None:
            sequence.timeline.enter(sequence.waiting_phase, self.now_s)
        return None

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; running sequences continue. Returns how many blocks it held."""
        return self.internal_state.forget_prefixes()

    def end_session(self, session_id: str, cache_salt: str = "") -> None:
        """Keeps nothing more for a session that its client has ended; others are ignored."""
        if (sessions := self.internal_state.sessions) is not None:
            sessions.end((cache_salt, session_id))

    def follow_caches(self) -> None:
        """Has changes of the prefix caches noted from now on; no plan depends on it."""
        self.internal_state.follow_caches()

    def take_cache_changes(self) -> list[Change]:
        """Removes and returns the changes of the prefix caches that answered steps made true."""
        state = self.internal_state
        return [] if state.changes is None else state.changes.take(state.acked_step)

    def _end(self, sequence: Sequence) -> None:
        """Removes a sequence from slots, queue and indexes; the caller renews the running set."""
        self.internal_state.remove(sequence)
        del self._live[sequence.request.request_id]
        self._unfinished.ended.append(sequence)
        self.num_finished += 1

    def _end_from_outside(
        self, sequence: Sequence, reason: FinishReason, message: str = ""
    ) -> Finished:
        was_running = sequence.status is Status.RUNNING
        finished = self._finish(sequence, reason, message)
        self._leave(was_running)
        return finished

    def _leave(self, was_running: bool = True) -> None:
        """Completes a call that ended sequences from outside."""
        if was_running:
            self._grants.left()
            self.internal_state.renew_running()
        self._unfinished = Unfinished()

    def schedule(
        self, most_prompt_tokens: int | None = None, drafts: Drafts = NO_DRAFTS
    ) -> StepPlan | None:
        """Plans the next step, with at most so many prompt tokens if rows decode in it.

        The slots in `drafts` take no part in it while a token of theirs is in flight. Returns None
        when there is nothing to compute before a result arrives.
        """
        plan = None if self._grants.pending else self._planner.plan(most_prompt_tokens, drafts)
        if plan is not None:
            self._in_flight.append(plan)
            self.counters.planned(plan)
            if (sessions := self.internal_state.sessions) is not None:
                sessions.work += max(plan.num_prefill_tokens, self._least_work)
        return plan

    def release(self) -> StepPlan | None:
        """Plans a step that only tells an idle worker which sequences have left it.

        Otherwise it would hold the last ones until the next request. None when a step is in flight,
        a sequence runs, or the worker knows.
        """
        if self._in_flight or not self.internal_state.is_idle_with_freed_slots:
            return None
        plan = self._planner.plan_release()
        self._in_flight.append(plan)
        self.counters.planned(plan)
        return plan

    def grant(self, max_steps: int) -> tuple[StepPlan, ...]:
        """Plans up to `max_steps` decode steps, to be sent in one frame.

        Returns no steps unless decoding is all there is to do. Their results arrive one by one, as
        those of other steps do; `cut` may take back steps that have not begun.
        """
        if max_steps < 1 or not self._grants.has_room:
            return ()
        plans = self._planner.plan_grant(max_steps)
        if plans:
            self._in_flight.extend(plans)
            self._grants.granted()
            if (sessions := self.internal_state.sessions) is not None:
                sessions.work += len(plans) * self._least_work
        return plans

    def cut(self, num_kept: int = 0) -> Cut | None:
        """Returns the granted steps to leave out, or None when no cut is needed.

        A cut is needed when a request waits, one was ended from outside, or too many rows have
        stopped, and more than `num_kept` granted steps are in flight. The worker answers with the
        steps that it skips; pass them to `skip`.
        """
        return self._grants.cut(num_kept)

    def skip(self, first_step_id: int, last_step_id: int) -> int:
        """Takes back the steps that the worker skipped after a cut; returns how many.

        Raises OutOfStep, with nothing changed, when they are not the steps that the cut named.
        """
        skipped = self._grants.skip(first_step_id, last_step_id)
        if skipped:
            self._planner.take_back(skipped, first_step_id - 1)
        if not self._in_flight:
            self.internal_state.acknowledge(last_step_id)
        return len(skipped)

    def update(self, result: StepResult) -> StepOutputs:
        """Applies the result of the oldest step in flight: appends tokens, ends sequences.

        Raises OutOfStep, with nothing changed, when the result is of another step or its shape is
        wrong.
        """
        plan = check_result(self._in_flight[0] if self._in_flight else None, result)
        state = self.internal_state
        if state.changes is not None:
            state.changes.step_id = self.last_step_id
        self._unfinished = Unfinished(plan, state.table.num_tokens[plan.sampled_slots])
        self._in_flight.popleft()
        self.counters.answered(plan, result)
        deliveries: list[PromptOutputDelivery] = []
        finished: list[Finished] = []
        if plan.due_prompt_outputs or plan.prompt_ends:
            deliveries, ends = prompt_outputs.receive(plan, result.prompt_outputs, state)
            # A sequence that a report ends receives no further token.
            finished = self._finish_all(ends)
        if plan.num_prefill_tokens:
            self._token_updates.begin_decoding(plan.sampled_slots)
        if finished:
            state.renew_running()
        token_update = self._token_updates.take(plan, result, self._unfinished.late)
        if token_update.ends:
            finished += self._finish_all(token_update.ends)
            state.renew_running()
        state.acknowledge(plan.step_id)
        if state.transfers is not None and plan.num_prefill_tokens:
            store_prompts(state, plan)
        if state.suspects:
            clear_suspects(plan)
            state.note_suspects(state.suspects)
        self.num_output_tokens += len(token_update.token_ids)
        self._unfinished = Unfinished()
        return token_update.with_ends(finished, deliveries)

    def _finish_all(self, ends: Iterable[End]) -> list[Finished]:
        return [self._finish(end.sequence, end.reason, end.message) for end in ends]

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> Finished:
        with blaming(sequence.request.request_id):
            state, block_ids = self.internal_state, list[int]()
            if state.transfers is not None and sequence.slot is not None:
                block_ids = state.table.held_blocks(sequence.slot)
            self._end(sequence)
            if block_ids:
                store_answer(state, sequence, block_ids)
            self.recent.note(sequence, reason, message, self.now_s)
            if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.num_output:
                self.output_lengths.observe(sequence, sequence.num_output)
            return Finished.of(sequence, reason, message, self.config.eos_token_ids)

    def worker_lost(
        self,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        is_death: bool = False,
        num_state_snapshots: int | None = None,
        num_tier_blocks: int | None = None,
        keeps_tier: bool = False,
        num_disk_blocks: int | None = None,
    ) -> int:
        """Sends running sequences back to the queue, with their tokens: the worker is gone.

        Its KV is lost, and results that have not arrived are void. The numbers of blocks and
        snapshots are those of the new worker, where they differ. What its tiers hold is kept while
        its process may live, and when it has come back. Returns how many sequences were running.
        """
        state = self.internal_state
        self._lost_steps.note(self._in_flight)
        self.counters.lost(self._in_flight)
        self._in_flight.clear()
        self._grants.reset()
        self._planner.reset()
        state.acked_step = self._planner.last_step_id
        state.is_worker_away = True
        for sequence in self._live.values():
            sequence.timeline.enter(Phase.WORKER_AWAY, self.now_s)
            sequence.num_prompt_outputs_planned = sequence.num_prompt_outputs_delivered
        num_ran = state.evacuate(
            WorkerRoom(
                num_blocks or state.pool.num_blocks,
                _new_or(num_host_blocks, state.host.num_blocks),
                _new_or(num_state_snapshots, state.num_state_snapshots),
                _new_or(num_tier_blocks, self.transfers.num_tier_blocks),
                _new_or(num_disk_blocks, self.transfers.num_disk_blocks),
            ),
            keeps_tier=keeps_tier,
        )
        if is_death:
            self.judge_loss(is_death=True)
        return num_ran

    def judge_loss(self, is_death: bool) -> None:
        """Makes the sequences of the lost steps suspect; without it a loss counts for nothing.

        The worker has died, or it lives and has refused a step.
        """
        self._lost_steps.blame(is_death)
        self.internal_state.note_suspects(self._live.values())

    def give_up(self, why: str) -> list[Finished]:
        """Ends the requests that lost worker after worker; `why` is the last worker's end."""
        finished = self._finish_all(hopeless_ends(self._live.values(), why))
        self._leave()
        return finished

    def worker_back(self) -> None:
        """Records that there is a worker again."""
        self.internal_state.is_worker_away = False
        self._lost_steps.plans = ()
        for sequence in self._live.values():
            sequence.timeline.enter(sequence.waiting_phase, self.now_s)

    def salvage(self, at_fault: Iterable[str], message: str) -> list[Finished]:
        """Rebuilds all state after an exception in a call: every live sequence waits again.

        What that call had begun is undone. The worker is lost with it: it holds another state.
        Ends the requests at fault, which enter no part of the state again; returns their ends.
        """
        unfinished, self._unfinished = self._unfinished, Unfinished()
        unfinished.undo(self.internal_state, self._live)
        leaving = [self._live.pop(i) for i in dict.fromkeys(at_fault) if i in self._live]
        self.num_finished += len(leaving) - len(unfinished.ended)
        rescue(self.internal_state, self._live.values(), leaving)
        self._deadlines.restart(self._live.values())
        self._in_flight.clear()  # no sequence is to blame for the steps in flight
        self.worker_lost()
        return [Finished.of(s, FinishReason.ERROR, message, ()) for s in leaving]

    def misfits(self) -> list[str]:
        """Ids of live requests that the KV cache cannot hold.

        There are some only after a worker with fewer blocks took over: the caller should fail them.
        """
        return self.intake.misfits(self._live.values(), self.internal_state.pool.num_usable)

    def fail(self, request_ids: Iterable[str], message: str) -> list[Finished]:
        """Ends live requests with an error; unknown ids are skipped. Returns the ends."""
        sequences = [self._live[i] for i in dict.fromkeys(request_ids) if i in self._live]
        finished = [self._finish(s, FinishReason.ERROR, message) for s in sequences]
        self._leave()
        return finished


def _new_or(new: int | None, before: int) -> int:
    return before if new is None else new
