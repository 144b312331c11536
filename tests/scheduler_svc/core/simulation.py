"""A scheduler with a checking worker and clients; every call is followed by a consistency check.

The output of a request is known in advance, because the worker samples by request and position
only. So with any events in between, and any number of steps in flight, each request must deliver
exactly that output, without a gap or a repeat, and end exactly once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from scheduler_svc.core import (
    Drafts,
    Finished,
    FinishReason,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.step.plan import NO_DRAFTS
from tests.scheduler_svc.core.cache_reader import CacheReader
from tests.scheduler_svc.core.fake_worker import FakeWorker, sampled_token
from tests.scheduler_svc.core.transitions import CacheTruth, FreeQueueWatch


class Simulation:
    """Everything outside the core, in one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.worker = self._fresh_worker()
        self.results: deque[StepResult] = deque()
        self.requests: list[Request] = []  # by handle
        self.outputs: list[list[int]] = []  # by handle
        self.told: list[list[int]] = []  # by handle: prompt positions delivered
        self.ends: dict[int, FinishReason] = {}  # by handle
        self.num_lost = 0
        self._free_queue = FreeQueueWatch()
        self.scheduler.follow_caches()
        self.reader = CacheReader(config.groups)
        self._cache_truths = [CacheTruth(*one) for one in enumerate(config.groups)]

    def _fresh_worker(self) -> FakeWorker:
        config = self.config
        worker = FakeWorker(config.groups, config.vocab_size, config.has_states)
        worker.keeps_pictures_whole = config.keeps_pictures_whole
        return worker

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended, oldest first."""
        return [sequence.request.request_id for sequence in self.scheduler.live()]

    def add(self, request: Request) -> Sequence:
        """Submits a request, whose handle must be the next number."""
        assert request.handle == len(self.requests)
        sequence = self.scheduler.add(request)
        self.requests.append(request)
        known = request.output_token_ids
        self.outputs.append([] if known is None else known.tolist())
        self.told.append([])
        self.check()
        return sequence

    def schedule(
        self, most_prompt_tokens: int | None = None, drafts: Drafts = NO_DRAFTS
    ) -> StepPlan | None:
        """Plans a step and executes it; its result is kept in `results`."""
        in_flight = list(self.scheduler._in_flight)
        plan = self.scheduler.schedule(most_prompt_tokens, drafts)
        if plan is not None:
            check_limit(plan, most_prompt_tokens)
            self._check_plan(plan, in_flight)
            self.results.append(self.worker.execute(plan))
        self.check()
        return plan

    def update(self, bad_rows: tuple[int, ...] = ()) -> None:
        """Delivers the oldest result, with `bad_rows` marked as failed."""
        result = self.results.popleft()
        bad_rows = tuple(row for row in bad_rows if row < len(result.token_ids))
        outputs = self.scheduler.update(replace(result, bad_rows=bad_rows))
        for told in outputs.prompt_outputs:
            handle = told.request.handle
            assert handle not in self.ends and not self.outputs[handle], "a report too late"
            whose = self.worker.received_for[result.step_id][told.row]
            assert whose.handle == handle, "a report on another request's prompt"
            report = result.prompt_outputs[told.row]
            self.told[handle] += range(report.begin, report.end)
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            assert handle not in self.ends, "a token after the end"
            self.outputs[handle].append(int(token_id))
        for finished in outputs.finished:
            self._end(finished)
        self.check(may_forget=bool(bad_rows))

    def abort(self, request_id: str) -> None:
        """Aborts a request, as a client does."""
        sequence = self.scheduler.find(request_id)
        assert sequence is not None
        finished = self.scheduler.abort(request_id)
        assert finished is not None
        assert (
            sequence.token_ids[sequence.num_prompt :].tolist()
            == (self.outputs[sequence.request.handle])
        )
        self._end(finished)
        self.check()

    def salvage(self, at_fault: list[str]) -> None:
        """Rebuilds the scheduler as after an exception; the worker is lost with it."""
        ends = self.scheduler.salvage(at_fault, "planted")
        self.send_worker_away()
        for finished in ends:
            self._end(finished)
        self.check()

    def give_up(self) -> None:
        """Ends the requests that lost worker after worker, as the shell does."""
        for finished in self.scheduler.give_up("planted"):
            self._end(finished)
        self.check()

    def fail(self, request_ids: Iterable[str]) -> None:
        """Fails requests, as the shell does."""
        for finished in self.scheduler.fail(request_ids, "given up"):
            self._end(finished)
        self.check()

    def set_priority(self, request_id: str, priority: int) -> None:
        """Changes a request's priority."""
        assert self.scheduler.set_priority(request_id, priority) is not None
        self.check()

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache of scheduler and worker."""
        self.scheduler.reset_prefix_cache()
        assert not len(self.scheduler.internal_state.pool.cache)
        self.worker.forget_prefixes()
        self.check(may_forget=True)

    def expire(self, now_s: float) -> None:
        """Advances the time."""
        for finished in self.scheduler.expire(now_s):
            self._end(finished)
        self.check()

    def lose_worker(
        self,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        num_state_snapshots: int | None = None,
    ) -> None:
        """Loses the worker with all results in flight, and replaces it at once."""
        self.send_worker_away()
        self.bring_worker_back(num_blocks, num_host_blocks, num_state_snapshots)

    def send_worker_away(self, is_death: bool = False, *, keeps_tier: bool = False) -> None:
        """Loses the worker with all results in flight, without a replacement."""
        self.scheduler.worker_lost(is_death=is_death, keeps_tier=keeps_tier)
        self.worker = self._fresh_worker()
        self.results.clear()
        self.num_lost += 1
        held = list(self.scheduler.internal_state.host.sequences)
        assert not held, f"in the host memory of a worker that is gone: {held}"
        self.check()

    def bring_worker_back(
        self,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        num_state_snapshots: int | None = None,
    ) -> None:
        """Attaches a worker; requests that it cannot hold fail."""
        self.scheduler.worker_lost(
            num_blocks, num_host_blocks, num_state_snapshots=num_state_snapshots
        )
        self.fail(self.scheduler.misfits())
        self.scheduler.worker_back()
        self.check()

    def drain(self, depth: int, max_steps: int = 5000) -> None:
        """Steps until every request has ended and every result has arrived."""
        for _ in range(max_steps):
            self.ask_for_requirements()
            for preparation_id in list(self.worker.preparing):
                self.answer_preparation(preparation_id)
            while self.scheduler.num_in_flight <= depth and self.schedule() is not None:
                pass
            if self.results:
                self.update()
            elif not self.live:
                return
            elif (
                not self.scheduler.internal_state.requirements.has_news
            ):  # else asked for at a sequence's turn
                raise AssertionError(f"stuck with {self.live}")
        raise AssertionError(f"{self.live} still run after {max_steps} steps")

    def ask_for_requirements(self) -> None:
        """Tells the worker what to prepare, and what not any more."""
        preparations = self.scheduler.take_preparations()
        if preparations is not None:
            self.worker.prepare(preparations)
        self.check()

    def answer_preparation(self, preparation_id: int, problem: str = "") -> None:
        """The worker has prepared a requirement, or found that it cannot."""
        preparation = self.worker.preparing[preparation_id]
        if problem:
            del self.worker.preparing[preparation_id]
        else:
            self.worker.finish_preparation(preparation_id)
        finished = self.scheduler.prepared(preparation_id, problem)
        if finished is not None:
            assert finished.reason is FinishReason.DEAD_END
            assert finished.message == f"{preparation.requirement.kind.value}: {problem}"
            self._end(finished)
        self.check()

    def check(self, may_forget: bool = False) -> None:
        """Checks the state: consistent, a valid successor, and matching the worker's memory."""
        check_invariants(self.scheduler)
        self._free_queue.check(self.scheduler, may_forget)
        self.reader.check(self.scheduler)
        for truth in self._cache_truths:
            truth.check(self.scheduler, self.worker)

    def _check_plan(self, plan: StepPlan, in_flight: list[StepPlan]) -> None:
        num_drafted = sum(map(len, plan.drafts.values()))
        assert 0 < len(plan.slots) <= self.config.max_num_seqs - num_drafted
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert plan.num_free_blocks == self.scheduler.internal_state.pool.num_free
        threshold = self.config.long_prefill_token_threshold
        if self.config.keeps_pictures_whole:  # a picture may exceed it
            threshold = 0
        if threshold and plan.num_scheduled is not None:
            is_prompt = ~np.isin(plan.slots, list(plan.drafts))
            assert plan.num_scheduled[is_prompt].max(initial=0) <= threshold
        touched = {slot for older in in_flight for slot in older.slots.tolist()}
        for new in plan.new_sequences:
            assert new.slot not in touched, "a slot was handed out under a step in flight"
            kinds = self.config.prepared_kinds
            wanted = [one for one in new.request.requirements if one.kind in kinds]
            assert list(new.preparations) == wanted, "it entered without what it requires"

    def _end(self, finished: Finished) -> None:
        handle = finished.request.handle
        assert handle not in self.ends, "ended twice"
        self.ends[handle] = finished.reason
        assert finished.num_output_tokens == len(self.outputs[handle])
        assert finished.num_prompt_tokens == len(finished.request.prompt_token_ids)
        expected, reason = self.expected(finished.request)
        got = self.outputs[handle]
        if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == expected[: len(got)]
        else:
            assert (got, finished.reason) == (expected, reason)
            asked = range(finished.request.prompt_output_begin, finished.request.prompt_output_end)
            assert self.told[handle] == list(asked)

    def expected(self, request: Request) -> tuple[list[int], FinishReason]:
        """The output of an undisturbed request, and why it ends."""
        config, num_prompt = self.config, len(request.prompt_token_ids)
        stops = {*request.stop_token_ids, *(() if request.ignore_eos else config.eos_token_ids)}
        limit = config.max_model_len - num_prompt
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        output: list[int] = []
        if request.max_tokens == 0:
            return output, FinishReason.LENGTH
        while True:
            position = num_prompt + len(output)
            output.append(sampled_token(request.request_id, position, config.vocab_size))
            if output[-1] in stops and len(output) >= request.min_tokens:
                return output, FinishReason.STOP
            if len(output) == limit:
                return output, FinishReason.LENGTH


def check_limit(plan: StepPlan, most_prompt_tokens: int | None) -> None:
    """Prompts compute no more than the limit in all where rows decode.

    The last token of a prompt counts as a decode: it takes no longer.
    """
    if most_prompt_tokens is not None and plan.num_prefill_tokens < plan.num_tokens:
        chunks = plan.num_scheduled
        num_single = len(plan.slots) if chunks is None else int((chunks == 1).sum())
        assert plan.num_prefill_tokens <= most_prompt_tokens + num_single
