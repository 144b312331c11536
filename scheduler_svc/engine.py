"""The one loop that owns the core: plan, send, receive, apply, deliver; and recover.

Everybody else on the event loop talks to the core through this engine's methods, which never await
between reading and changing it.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

import numpy as np

from pagewire.v1 import types_pb2, worker_pb2
from rpc.columns import BadColumn
from rpc.logprobs import LogprobColumns
from scheduler_svc.config import ServiceConfig
from scheduler_svc.convert import to_logprobs, to_result, to_step
from scheduler_svc.core import (
    Finished,
    FinishReason,
    OutOfStep,
    RefusalKind,
    Refused,
    Request,
    Scheduler,
    SchedulerConfig,
    StepOutputs,
    StepPlan,
)
from scheduler_svc.outbox import Admission, Ended, Outbox
from scheduler_svc.pace import Pace
from scheduler_svc.trace import Trace
from scheduler_svc.worker_link import FencedOut, LinkLost, WorkerClient, WorkerLink

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_MAX_STRIKES = 3  # workers lost at the same step before its requests are given up
_DEADLINE_CHECK_S = 0.02  # between looks at the deadlines while no step does it
_STATUS_CODES = {FinishReason.ERROR: 13, FinishReason.EXPIRED: 4}  # gRPC's


class NotReady(Exception):
    """No worker has attached yet, so nothing is known about what could be served."""


class Overloaded(Exception):
    """Too much waits already; there will be room later."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; try again in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


class WrongWorker(Exception):
    """The worker that came serves something else than the one before."""


class Engine:
    """The core, its worker and its clients."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.core: Scheduler | None = None
        self.model: types_pb2.ModelInfo | None = None
        self.epoch = 0
        self.is_ready = False
        self.reason = "no worker has attached yet"
        self.trace = Trace()
        self.pace = Pace()
        self.num_recoveries = 0
        self._worker = WorkerClient(config.worker)
        self._outboxes: dict[int, Outbox] = {}
        self._next_client = 0
        self._work = asyncio.Event()
        self._strikes = 0
        self.readiness_changed = asyncio.Event()
        self._started_s = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since this engine was made."""
        return time.monotonic() - self._started_s

    # --- clients ---------------------------------------------------------------------------------

    def open_client(self) -> tuple[int, Outbox]:
        """A number and an outbox for a stream that will submit requests."""
        self._next_client += 1
        self._outboxes[self._next_client] = outbox = Outbox()
        return self._next_client, outbox

    def close_client(self, client: int, request_ids: Iterable[str]) -> None:
        """Forgets a stream and aborts what it left live."""
        del self._outboxes[client]
        if self.core is not None:
            for request_id in request_ids:
                self.core.abort(request_id)
        self._work.set()

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises core.Refused, Overloaded, or NotReady before the first worker attached.
        """
        if self.core is None:
            raise NotReady(self.reason)
        try:
            self.core.add(request)
        except Refused as refused:
            if refused.kind is not RefusalKind.OVERLOADED:
                raise
            retry_after_s = self.pace.retry_after_s(self.core, request, request.arrival_s)
            raise Overloaded(str(refused), retry_after_s) from refused
        self._work.set()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Raises NotReady before the first worker attached."""
        if self.core is None:
            raise NotReady(self.reason)
        return self.core.config.vocab_size

    def abort(self, request_id: str) -> bool:
        """Ends a live request without telling its client; False when there is none."""
        return self.core is not None and self.core.abort(request_id) is not None

    def abort_and_tell(self, request_id: str) -> bool:
        """Ends a live request for somebody else than its client, who is told."""
        sequence = self.core.abort(request_id) if self.core else None
        if sequence is None:
            return False
        finished = Finished(
            request=sequence.request,
            reason=FinishReason.ABORT,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=sequence.num_output,
            num_cached_tokens=sequence.num_cached or 0,
        )
        self._tell_end(finished)
        return True

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Attaches, serves, recovers; until cancelled or FencedOut."""
        expiring = asyncio.create_task(self._expire_while_away())
        try:
            while True:
                try:
                    link = await self._attach()
                except LinkLost as error:
                    self._set_ready(False, str(error))
                    await asyncio.sleep(_RETRY_S)
                    continue
                try:
                    await self._serve(link)
                except LinkLost as error:
                    self._recover(str(error))
                finally:
                    await link.close()
        finally:
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)
            self._set_ready(False, "the scheduler is stopping")
            await self._worker.close()

    async def _attach(self) -> WorkerLink:
        seen = await self._worker.epoch()
        if self.epoch and seen > self.epoch:
            raise FencedOut(f"epoch {seen} has taken the worker from epoch {self.epoch}")
        first_step_id = self.core.last_step_id + 1 if self.core else 1
        link = await self._worker.attach(seen + 1, first_step_id)
        self.epoch = link.attached.epoch
        try:
            self._adopt(link.attached.description)
        except (WrongWorker, ValueError) as error:
            await link.close()
            raise LinkLost(f"worker {self.config.worker} is refused: {error}") from error
        logger.info("attached to worker %s under epoch %d", self.config.worker, self.epoch)
        self._set_ready(True, "")
        return link

    def _adopt(self, worker: worker_pb2.WorkerDescription) -> None:
        """Builds the core for the first worker; later ones must serve the same."""
        if self.core is None:
            self.model = worker.model
            self.core = Scheduler(core_config(self.config, worker))
            return
        before = self.core.config
        if self.model is not None and worker.model.config_sha256 != self.model.config_sha256:
            raise WrongWorker(
                f"it serves {worker.model.model} (config {worker.model.config_sha256[:12]}), "
                f"not {self.model.model} (config {self.model.config_sha256[:12]})"
            )
        if worker.block_size != before.block_size or worker.max_num_seqs < before.max_num_seqs:
            raise WrongWorker("its block_size or max_num_seqs differs from the worker before it")
        self.core.worker_lost(worker.num_blocks)
        message = f"the new worker's KV cache of {worker.num_blocks} blocks is too small for it"
        for finished in self.core.fail(self.core.misfits(), message):
            self._tell_end(finished)
        self.core.worker_back()

    async def _serve(self, link: WorkerLink) -> None:
        core = self.core
        assert core is not None
        while True:
            self._expire(core)
            while core.num_in_flight <= self.config.lookahead:
                plan = core.schedule()
                if plan is None:
                    break
                self.trace.sent(plan, time.monotonic())
                self._tell_admitted(plan)
                await link.send(to_step(plan))
            if core.num_in_flight:
                output = await link.receive(self.config.step_timeout_s)
                self._apply(core, output)
            else:
                await self._idle(link)

    def _apply(self, core: Scheduler, output: worker_pb2.ModelRunnerOutput) -> None:
        if output.error:
            raise LinkLost(f"step {output.step_id} failed: {output.error}")
        self._expire(core)
        try:
            result, logprobs = to_result(output), to_logprobs(output)
            outputs = core.update(result)
        except (BadColumn, OutOfStep) as error:  # the core is as before: the step is done again
            raise LinkLost(f"step {output.step_id}: {error}") from error
        self._deliver(outputs, logprobs)
        record, now_s = self.trace.done(output.step_id, time.monotonic()), core.now_s
        self.pace.stepped(record.plan, record.sent_s, now_s)
        self._strikes = 0

    def _expire(self, core: Scheduler) -> None:
        """Tells the core the time, and the clients whose deadline has come."""
        for finished in core.expire(time.monotonic()):
            self._tell_end(finished)

    async def _expire_while_away(self) -> None:
        """Deadlines hold while no step is planned, too: during a long one, or without a worker."""
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            if self.core is not None and self.core.next_deadline_s is not None:
                self._expire(self.core)

    async def _idle(self, link: WorkerLink) -> None:
        """Waits for work; notices meanwhile that the worker is gone."""
        working = asyncio.ensure_future(self._work.wait())
        try:
            reading = link.reading()
            await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
        self._work.clear()
        if reading.done():  # nothing was asked, so this can only be the stream's end
            await link.receive(self.config.step_timeout_s)
            raise LinkLost("the worker answered a step that was not sent")

    def _recover(self, why: str) -> None:
        """After a lost worker: everyone waits again; who loses it time after time is given up."""
        core = self.core
        assert core is not None
        oldest: StepPlan | None = core.oldest_in_flight
        logger.warning("worker lost, %d requests will be recomputed: %s", core.num_running, why)
        self._set_ready(False, why)
        self.num_recoveries += 1
        self._strikes += 1
        core.now_s = time.monotonic()
        core.worker_lost()
        if oldest is not None and self._strikes >= _MAX_STRIKES:
            self._strikes = 0
            culprits = [s.request.request_id for s in oldest.sequences()]
            for finished in core.fail(culprits, f"its step failed {_MAX_STRIKES} times: {why}"):
                self._tell_end(finished)

    # --- what clients hear -----------------------------------------------------------------------

    def _deliver(self, outputs: StepOutputs, logprobs: LogprobColumns | None) -> None:
        clients, handles, token_ids = outputs.clients, outputs.handles, outputs.token_ids
        if logprobs is not None and outputs.sampled_rows is not None:
            logprobs = logprobs.select(outputs.sampled_rows)
        if len(clients):
            first = int(clients[0])
            if (clients == first).all():  # one gateway: the usual case
                self._tell_tokens(first, handles, token_ids, logprobs)
            else:
                for client in np.unique(clients).tolist():
                    rows = np.flatnonzero(clients == client)
                    own = None if logprobs is None else logprobs.select(rows)
                    self._tell_tokens(client, handles[rows], token_ids[rows], own)
        for finished in outputs.finished:
            self._tell_end(finished)

    def _tell_tokens(
        self,
        client: int,
        handles: np.ndarray[tuple[int], np.dtype[np.uint32]],
        token_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        logprobs: LogprobColumns | None,
    ) -> None:
        outbox = self._outboxes.get(client)
        if outbox is not None:
            outbox.put_tokens(handles, token_ids, logprobs)

    def _tell_admitted(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            outbox = self._outboxes.get(new.request.client)
            if outbox is not None:
                outbox.put_admission(Admission(new.request.handle, new.num_first_cached_tokens))

    def _tell_end(self, finished: Finished) -> None:
        outbox = self._outboxes.get(finished.request.client)
        if outbox is not None:
            outbox.put_end(Ended(finished, _STATUS_CODES.get(finished.reason, 0)))

    def _set_ready(self, is_ready: bool, reason: str) -> None:
        if reason and reason != self.reason:
            logger.info("not ready: %s", reason)
        self.is_ready, self.reason = is_ready, reason
        self.readiness_changed.set()


def core_config(config: ServiceConfig, worker: worker_pb2.WorkerDescription) -> SchedulerConfig:
    """The core's limits: this process's options within what the worker can do."""
    max_num_seqs = min(config.max_num_seqs, worker.max_num_seqs)
    budget = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    return SchedulerConfig(
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=worker.model.max_model_len,
        vocab_size=worker.model.vocab_size,
        eos_token_ids=tuple(worker.model.eos_token_ids),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.policy,
        priority_ageing_s=config.priority_ageing_s,
        tenant_weights=config.tenant_weights,
        queue_window=config.queue_window,
        max_overtakes=config.max_overtakes,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_waiting_requests_per_tenant=config.max_waiting_requests_per_tenant,
        max_waiting_tokens_per_tenant=config.max_waiting_tokens_per_tenant,
    )
