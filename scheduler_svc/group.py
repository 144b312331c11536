"""One worker group: its core, its step stream, and the loop that plans, sends, receives, applies.

When the worker is lost the group recovers: running requests return to the queue with every token
received, and the loop attaches again. No other task changes the core while a method here runs: none
awaits between reading and changing it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pagewire.v1 import worker_pb2
from scheduler_svc.adapters import AdapterRegistry
from scheduler_svc.clients.registry import Clients
from scheduler_svc.config import ServiceConfig
from scheduler_svc.containment import Containment, CoreBroken
from scheduler_svc.core import Preemption, Scheduler
from scheduler_svc.core_config import (
    PeerFacts,
    check_successor,
    core_config,
    peer_facts,
    tier_of,
)
from scheduler_svc.explain.trace import Trace
from scheduler_svc.journal.recorder import Recorder
from scheduler_svc.journal.start import make_core
from scheduler_svc.kv_events.start import Publisher, open_publisher
from scheduler_svc.observe.step_profile import LoopProfile
from scheduler_svc.speculation.start import problem_with_worker
from scheduler_svc.stepping import ProfiledStepping, Stepping
from scheduler_svc.transfers import TransferTraffic
from scheduler_svc.worker.link import (
    AttachRefused,
    FencedOut,
    LinkLost,
    OpenChannel,
    Prepared,
    WorkerClient,
    WorkerLink,
    open_channel,
)
from scheduler_svc.worker.pace import Pace
from scheduler_svc.worker.served import Served, WrongWorker
from scheduler_svc.worker.state_check import StateCheck
from scheduler_svc.worker.verdict import LossVerdict
from scheduler_svc.worker.watching import is_drained, watch_over
from wire.adapters import AdapterSource
from wire.deaths import PeerLoss
from wire.versions import DISK_TIER, HOST_TIER

logger = logging.getLogger(__name__)

_RETRY_S = 0.3  # between attempts to attach
_MOST_RETRY_S = 1.5  # to an address that has not answered for long
_QUICK_RETRIES = 60


class KvMoves(Protocol):
    """The moves of requests with their KV between groups, as one group sees them."""

    def peer_of(self, receiver: "WorkerGroup", stream_name: str) -> worker_pb2.PeerKv | None:
        """The address at which a group's worker pulls from that of a stream; None: it cannot."""

    def settle(self, group: "WorkerGroup") -> None:
        """Goes on with what moves from a group and to it, between two of its steps."""

    def lost(self, group: "WorkerGroup") -> None:
        """Ends what moves from a group and to it, whose stream has ended."""


class WorkerGroup:
    """The worker group with its leader at one address, and all requests placed there."""

    def __init__(
        self,
        config: ServiceConfig,
        address: str,
        clients: Clients,
        served: Served,
        on_readiness: Callable[[], None],
        open_channel: OpenChannel = open_channel,
        has_others: Callable[[], bool] = lambda: False,
        adapters: AdapterRegistry | None = None,
        moves: KvMoves | None = None,
    ) -> None:
        self.address = address
        self.core: Scheduler | None = None
        self.recorder: Recorder | None = None
        self.epoch = 0
        self.is_ready = False
        self.reason = "no worker has attached yet"
        self.trace = Trace()
        self.pace = Pace(None if config.target_itl_ms is None else config.target_itl_ms / 1e3)
        self.state_check: StateCheck | None = None  # of the current stream
        # Reported by its worker.
        self.attention_backend = self.all_reduce = self.device = self.kv_cache_dtype = ""
        self.tiers = worker_pb2.KvTier(), worker_pb2.KvTier()  # in host memory, and on disk
        self.source = "--worker"  # where its address comes from
        self.why_drained = ""  # it gets no new requests; empty: it does
        self.is_dismissed = False  # it is not attached again
        self.is_kept = False  # although dismissed
        self.num_recoveries, self.why_lost = 0, ""  # and the reason of the last loss
        self.profile: LoopProfile | None = None  # while steps are recorded
        self._config = config
        self._clients = clients
        self._served = served
        self._adapters = adapters or AdapterRegistry()
        self._on_readiness = on_readiness
        self.worker = WorkerClient(address, config.heartbeat_timeout_s, open_channel)
        self._work = asyncio.Event()
        self._link: WorkerLink | None = None
        self._containment = Containment()
        self._broken: CoreBroken | None = None
        self.verdict = LossVerdict(has_others)
        self._incarnation = 0
        self._claimed_epoch = 0  # perhaps taken by the worker, though unanswered
        self.kv: PeerFacts | None = None  # of its worker, if KV moves from it and to it
        self.server_name = ""  # of its certificate; empty: the address's host
        self._moves = moves
        self.rank = 0  # among the groups, for readers of KV events
        self.publisher: Publisher | None = None  # of KV events, if they are published
        self._left = asyncio.Event()  # set when it is dismissed
        self._is_let_go = False  # drained, and its stream closed for that

    @property
    def is_open(self) -> bool:
        """True if it takes new requests and can compute them."""
        return self.is_ready and not self.why_drained

    @property
    def why_not_open(self) -> str:
        """Why it takes no new requests, in words."""
        return self.why_drained if self.is_ready else self.reason

    @property
    def stream_name(self) -> str:
        """The name of its step stream; no other one has had it."""
        return f"{self.address} {self.epoch}"

    @property
    def is_attached(self) -> bool:
        """True if a step stream is open."""
        return self._link is not None

    def drain(self, why: str, *, is_final: bool = False) -> None:
        """Gives the worker no new requests; it is let go once those that run have finished.

        A drain that is final ends `run` then; otherwise the next worker at the address is attached.
        """
        if is_final:
            self.is_dismissed = True
            self._left.set()
        if self.why_drained and not is_final:
            return
        is_new, self.why_drained = not self.why_drained, why
        self.wake()
        if is_new and self.core is not None:
            self.core.now_s = time.monotonic()
            self.core.migration.close()
        logger.info("worker %s gets no new requests: %s", self.address, why)
        self._on_readiness()

    def recall(self) -> None:
        """Ends a drain, if there is one: the group takes new requests again."""
        self.is_dismissed = False
        self._left.clear()
        if self.why_drained:
            logger.info("worker %s gets new requests again", self.address)
            self._reopen()
            self._on_readiness()

    def _reopen(self) -> None:
        self.why_drained = ""
        if self.core is not None:
            self.core.migration.reopen()
            self.wake()

    def wake(self) -> None:
        """Wakes the loop because there may be steps to plan."""
        self._work.set()

    def expire(self) -> None:
        """Advances the core's time and notifies the clients of requests past their deadline."""
        if self.core is None:
            return
        try:
            finished = self.core.expire(time.monotonic())
        except Exception as error:
            self.contain(error)
        else:
            self._clients.tell_ends(finished)

    def contain(self, error: Exception, *at_fault: str) -> None:
        """Ends the requests at fault and lets the others go on, after an exception in the core.

        If that is not possible, the loop raises CoreBroken.
        """
        core = self.core
        assert core is not None
        core.now_s = time.monotonic()
        try:
            self._clients.tell_ends(self._containment.contain(core, error, at_fault))
        except CoreBroken as broken:
            self._broken = broken
        if self._link is not None:  # the worker's slots are those of another state
            self._link.lose("the scheduler begins anew after an exception")

    async def run(self) -> None:
        """Attaches, serves and recovers until cancelled, or dismissed and drained.

        Raises FencedOut, CoreBroken. May be called again.
        """
        self.worker.open()
        num_failures = 0
        try:
            while self._broken is None and not self.is_dismissed:
                try:
                    link = await self._attach()
                except LinkLost as error:
                    if self.verdict.is_death_by(error):
                        self._conclude(is_death=True)
                    self._served.release(self.address)
                    self._set_ready(False, str(error))
                    num_failures += 1
                    await self._pause(_RETRY_S if num_failures < _QUICK_RETRIES else _MOST_RETRY_S)
                    continue
                num_failures = 0
                try:
                    await self._serve(link)
                except LinkLost as error:
                    self._recover(str(error), error.loss)
                except FencedOut:
                    raise
                except Exception as error:
                    self.contain(error)
                    self._set_ready(False, "the scheduler begins anew after an exception")
                finally:
                    self._link = None
                    self._served.release(self.address)
                    await link.close()
            if self._broken is not None:
                raise self._broken
        finally:
            if self.verdict.is_open and self.is_dismissed:
                self._conclude(is_death=True)  # none will answer here
            self._served.release(self.address)
            self._set_ready(False, self.why_drained or "the scheduler is stopping")
            await self.worker.close()

    def close(self) -> None:
        """Ends the recording and the KV events, once `run` has ended for good."""
        if self.recorder is not None:
            self.recorder.close()
        if self.publisher is not None:
            self.publisher.close()

    async def _pause(self, duration_s: float) -> None:
        """Waits before the next attempt; not longer than until the group is dismissed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._left.wait()

    # --- attaching -------------------------------------------------------------------------------

    async def _attach(self) -> WorkerLink:
        seen = await self._take()
        first_step_id = self.core.last_step_id + 1 if self.core else 1
        before, self._claimed_epoch = self._claimed_epoch, seen + 1
        try:
            link = await self.worker.attach(seen + 1, first_step_id)
        except AttachRefused:
            self._claimed_epoch = before
            raise
        self.epoch = link.attached.epoch
        try:
            self._adopt(link.attached.description)
        except (WrongWorker, ValueError) as error:
            await link.close()
            raise LinkLost(f"worker {self.address} is refused: {error}") from error
        self._served.attached(link.attached.description.incarnation, self.epoch)
        logger.info("attached to worker %s under epoch %d", self.address, self.epoch)
        self._is_let_go = False
        if self.why_drained and not self.is_dismissed:  # the worker before it asked for that
            self._reopen()
        self._set_ready(True, "")
        return link

    async def _take(self) -> int:
        """Claims the worker for this group; returns the epoch before the next one.

        Raises FencedOut when another scheduler has taken it. Of another process at this address,
        never this group's, only an epoch of a later term tells that.
        """
        answer = await self.worker.describe()
        seen, found, term = int(answer.epoch), answer.description.incarnation, self._served.term
        if self.verdict.is_open:
            is_death = not found or found != self._incarnation
            has_refused = not is_death and answer.refusal.epoch == self.epoch
            if has_refused:  # gRPC lost the status that said so
                self.verdict.why_lost = answer.refusal.cause
            self._conclude(is_death, has_refused=has_refused)
        ours = max(self.epoch, self._claimed_epoch, self._served.epoch_of(found))
        is_same = found in (0, self._incarnation) or self._served.epoch_of(found)
        if seen > ours and ((self.epoch and is_same) or (term and seen >= term)):
            raise FencedOut(f"epoch {seen} has taken the worker from epoch {self.epoch or term}")
        try:
            self._served.claim(self.address, answer.description)
        except WrongWorker as error:
            raise LinkLost(f"worker {self.address} is refused: {error}") from error
        return max(seen, term - 1)

    def _adopt(self, worker: worker_pb2.WorkerDescription) -> None:
        """Creates the core for the first worker, or gives it the new one's KV cache.

        Raises WrongWorker when the worker serves another model or has other limits.
        """
        if self._config.preemption is Preemption.SWAP and not worker.num_host_blocks:
            raise WrongWorker("it has no host blocks (--host-blocks), which preemption swap needs")
        if self._config.preemption is Preemption.SWAP and worker.has_states:
            raise WrongWorker(
                "its sequences have states in their slots, which preemption swap does not keep"
            )
        if problem := problem_with_worker(self._config.speculative_config, worker):
            raise WrongWorker(problem)
        self._served.claim(self.address, worker)
        is_same = worker.incarnation == self._incarnation
        if not is_same:
            self._incarnation = worker.incarnation
            self.pace.new_worker(worker.rehearsed_steps)
            self.worker.patience.forget()
        self._served.check(worker.model)
        self.attention_backend, self.all_reduce = worker.attention_backend, worker.all_reduce
        self.device, self.kv_cache_dtype = worker.device, worker.kv_dtype
        self._adapters.hear(map(AdapterSource.from_message, worker.adapters), self.address)
        self.kv = peer_facts(worker)
        host, disk = self.tiers = tier_of(worker, HOST_TIER), tier_of(worker, DISK_TIER)
        if self.core is None:
            limits, options = core_config(self._config, worker), self._config.record
            made = make_core(limits, worker, self.address, options)
            self.core, self.recorder = made.core, made.recorder
            if self._config.kv_events is not None:
                self.core.follow_caches()
                groups = self.core.config.groups
                self.publisher = open_publisher(self._config.kv_events, self.rank, groups)
            if self.is_dismissed:
                self.core.migration.close()
            return
        before = self.core.config
        check_successor(before, worker)
        self.core.now_s = time.monotonic()
        self.core.worker_lost(
            worker.num_blocks,
            worker.num_host_blocks,
            num_state_snapshots=worker.num_state_snapshots,
            num_tier_blocks=host.num_blocks,
            keeps_tier=is_same,
            num_disk_blocks=disk.num_blocks,
        )
        message = f"the new worker's KV cache of {worker.num_blocks} blocks is too small for it"
        self._clients.tell_ends(self.core.fail(self.core.misfits(), message))
        self.core.worker_back()

    # --- serving ---------------------------------------------------------------------------------

    async def _serve(self, link: WorkerLink) -> None:
        core = self.core
        assert core is not None
        self._link = link
        lets_go = partial(self._lets_go, link, core)
        watch = watch_over(link, core, self.pace, self._config.step_timeout_s, lets_go)
        watching = asyncio.create_task(watch)
        try:
            await self._step_by_step(link, core)
        finally:
            watching.cancel()

    def _lets_go(self, link: WorkerLink, core: Scheduler) -> bool:
        """Closes the link of a drained worker; returns whether it did."""
        self._is_let_go = bool(self.why_drained) and is_drained(core)
        if self._is_let_go:
            link.lose(self.why_drained)
        return self._is_let_go

    async def _step_by_step(self, link: WorkerLink, core: Scheduler) -> None:
        plain = Stepping(self._config, core, link, self._clients, self.trace, self.pace)
        self.state_check = plain.state_check
        has_tier = core.transfers.num_tier_blocks or core.transfers.num_disk_blocks
        if has_tier or self.kv is not None:
            s_per_token = partial(getattr, self.pace, "s_per_token")
            plain.transfers = TransferTraffic(core, link, self.wake, self._peer_of, s_per_token)
        link.on_prepared = partial(self._on_prepared, core)
        link.on_draining = partial(self.drain, "the worker is shutting down")
        while True:
            self.expire()
            if self._moves is not None:
                self._moves.settle(self)
            await self._observed(plain).plan_ahead()
            if not plain.awaits_answer:
                await self._idle(link)
                continue
            answer = await link.receive()
            self.expire()
            self._observed(plain).apply(answer)  # by a recording that began meanwhile, too
            self.tell_cache_changes()

    def _peer_of(self, stream_name: str) -> worker_pb2.PeerKv | None:
        return None if self._moves is None else self._moves.peer_of(self, stream_name)

    def tell_cache_changes(self) -> None:
        """Has the changes of the prefix caches published that are true by now."""
        if self.publisher is None or self.core is None:
            return
        if changes := self.core.take_cache_changes():
            self.publisher.publish(changes)

    def _observed(self, plain: Stepping) -> Stepping:
        return plain if self.profile is None else ProfiledStepping(plain, self.profile)

    def _on_prepared(self, core: Scheduler, answer: Prepared) -> None:
        core.now_s = time.monotonic()
        finished = core.prepared(answer.preparation_id, answer.problem)
        if finished is not None:
            self._clients.tell_ends([finished])
        self.wake()

    async def _idle(self, link: WorkerLink) -> None:
        """Waits for work. Raises LinkLost when the worker is gone meanwhile."""
        working = asyncio.ensure_future(self._work.wait())
        try:
            reading = link.reading()
            await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
        self._work.clear()
        if reading.done():  # no request was sent, so this is the stream's end
            await link.receive()
            raise LinkLost("the worker answered a step that was not sent")

    def _recover(self, why: str, loss: PeerLoss) -> None:
        """Returns running requests to the queue; ends those that lost worker after worker."""
        core = self.core
        assert core is not None
        if self._broken is not None:
            return
        core.now_s = time.monotonic()
        num_ran = core.worker_lost(keeps_tier=True)  # which process comes back will show
        if self._moves is not None:
            self._moves.lost(self)
        self.tell_cache_changes()
        if self._is_let_go:
            logger.info("worker %s is drained", self.address)
            self._set_ready(False, why)
            return
        logger.warning("worker lost, %d requests will be recomputed: %s", num_ran, why)
        self.why_lost = why
        self.num_recoveries += 1
        self.verdict.begin(why)
        if loss is not PeerLoss.UNCLEAR:
            self._conclude(loss is PeerLoss.DEATH, has_refused=loss is PeerLoss.OWN_END)
        self._set_ready(False, why)

    def _conclude(self, is_death: bool, *, has_refused: bool = False) -> None:
        """Blames the requests that the lost worker computed, or nothing if it was the link."""
        assert self.core is not None
        why = self.verdict.why_lost
        self.verdict.end()
        self.core.now_s = time.monotonic()
        if is_death or has_refused:
            self.core.judge_loss(is_death)
        self._clients.tell_ends(self.core.give_up(why))
        self._on_readiness()

    def _set_ready(self, is_ready: bool, reason: str) -> None:
        if reason and reason != self.reason:
            logger.info("worker %s is not ready: %s", self.address, reason)
        has_changed, self.is_ready, self.reason = is_ready != self.is_ready, is_ready, reason
        if has_changed:
            self._on_readiness()
