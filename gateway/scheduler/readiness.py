"""The scheduler's report of whether requests can be served, and by which model."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc

from gateway.errors.request_errors import unavailable
from gateway.request.generation import ServedModel
from gateway.scheduler.convert import model_from_proto
from gateway.scheduler.link import SchedulerLink
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from wire.adapters import AdapterSource
from wire.grammar import LLGUIDANCE_VERSION
from wire.patience import Patience
from wire.versions import session_problem

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 2.0
WAIT_POLL_S = 0.1
PRIORITY_POLICY = "priority"  # the one under which priorities count
MOST_OF_CALL = 128  # outputs, until a scheduler says how many run at once
LONGEST_POLL_S = 30.0  # of a scheduler that did not answer in time before

log = logging.getLogger("gateway.scheduler.readiness")


@dataclass(frozen=True, slots=True)
class Readiness:
    """The current state.

    A model without is_ready is normal: its worker is away for a moment, and the scheduler holds
    requests until it returns.
    """

    is_ready: bool
    reason: str  # why it is not ready, for clients: without addresses
    model: ServedModel | None  # requests may be submitted for it
    detail: str = ""  # of the reason, for the log
    policy: str = ""  # of the queue; empty: unknown
    adapters: tuple[AdapterSource, ...] = ()  # that requests may name, with the model

    @property
    def models(self) -> list[ServedModel]:
        """The model and its adapters, as requests name them; none before a worker attached."""
        if self.model is None:
            return []
        return [self.model, *map(self.model.of_adapter, self.adapters)]


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of all worker groups, as the scheduler said last."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    block_size: int = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counts that only the scheduler has, as of its last answer."""

    num_preemptions: int = 0
    steps_by_size: tuple[int, ...] = ()  # by the bounds of TOKENS; empty: not told
    num_step_tokens: int = 0


Listener = Callable[[Readiness], Awaitable[None]]


class ReadinessWatch:
    """Polls the scheduler about once a second, and at once when its stream opens or breaks."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        link: SchedulerLink,
        tokenizer: Tokenizer,
        served_name: str | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = (
            scheduler_pb2_grpc.SchedulerServiceStub(channel)
        )
        self._link = link
        self._tokenizer = tokenizer
        self._served_name = served_name
        self._poll_interval_s = poll_interval_s
        self._patience = Patience(POLL_TIMEOUT_S, LONGEST_POLL_S)
        self._is_draining = False
        self._warned_of = ""  # version of llguidance
        self.kv_cache = KvCache()
        self.engine = EngineCounts()
        self._max_num_seqs = 0  # unknown
        self.current = Readiness(False, "the scheduler has not answered yet", None)

    @property
    def most_of_call(self) -> int:
        """Outputs of one call that may be with the scheduler at once.

        Twice as many as run: what ends has a successor, and other callers wait for no more.
        """
        return 2 * self._max_num_seqs or MOST_OF_CALL

    def require_model(self, *, is_accepted: bool = False) -> ServedModel:
        """The model that requests may be submitted for. Raises RequestError when there is none.

        `is_accepted`: for a part of a call that was accepted before this gateway began to drain.
        """
        if self._is_draining and not is_accepted:
            raise unavailable("this gateway is shutting down")
        if self.current.model is None:
            raise unavailable(self.current.reason)
        return self.current.model

    async def wait_for_model(self) -> None:
        """Waits until there is a model, or for as long as a worker may take to come back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._link.worker_timeout_s):
                while self.current.model is None and not self._is_draining:
                    await asyncio.sleep(WAIT_POLL_S)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits until the scheduler has told what was asked for, or for a few seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_POLL_S):
                while not is_so():
                    await asyncio.sleep(WAIT_POLL_S)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._is_draining = True
        reason = "this gateway is shutting down"
        self.current = replace(self.current, is_ready=False, reason=reason, detail="")

    async def run(self, listener: Listener) -> None:
        """Polls until cancelled; calls the listener on every change."""
        while True:
            # Cleared first: a change of the stream during the poll triggers the next one at once.
            self._link.changed.clear()
            found = await self._poll()
            if found != self.current and not self._is_draining:
                why = ": ".join(filter(None, (found.reason, found.detail)))
                log.info("ready" if found.is_ready else f"not ready: {why}")
                self._warn_of_grammars(found.model)
                self.current = found
                await listener(found)
            try:
                async with asyncio.timeout(self._poll_interval_s):
                    await self._link.changed.wait()
            except TimeoutError:
                pass

    def _warn_of_grammars(self, model: ServedModel | None) -> None:
        """Warns if gateway and worker have different versions of llguidance."""
        theirs = model.llguidance_version if model else ""
        if theirs not in ("", LLGUIDANCE_VERSION, self._warned_of):
            self._warned_of = theirs
            log.warning(
                f"this gateway reads grammars by llguidance {LLGUIDANCE_VERSION}, the worker by "
                f"{theirs}: a grammar that passes here may end its request there"
            )

    async def _poll(self) -> Readiness:
        request = scheduler_pb2.GetStatusRequest()
        try:
            status = await self._stub.GetStatus(request, timeout=self._patience.limit_s)
        except grpc.aio.AioRpcError as error:
            problem = f"{error.code().name}: {error.details()}"
            if is_late := is_timeout(error):
                self._patience.gave_up()
            # Its stream tells whether it is gone. If it is slow, requests wait there.
            may_live = is_late or error.code() is grpc.StatusCode.UNAVAILABLE
            is_kept = (may_live and self._link.is_open) or self._link.is_handing_over
            model = self.current.model if is_kept else None
            policy, adapters = self.current.policy, self.current.adapters
            reason = "the scheduler does not answer"
            return Readiness(False, reason, model, problem, policy, adapters)
        self._patience.fade(self._poll_interval_s)
        if (wrong_version := session_problem(status.session_version)) is not None:
            return Readiness(False, wrong_version, None)
        self._max_num_seqs = status.max_num_seqs
        self.kv_cache = KvCache(status.num_blocks, status.num_free_blocks, status.block_size)
        sizes = tuple(status.steps_by_size)
        self.engine = EngineCounts(status.num_preemptions, sizes, status.num_step_tokens)
        if not status.HasField("model"):
            model = self.current.model if self._link.is_handing_over else None
            adapters = self.current.adapters
            reason = "no worker has attached yet"
            return Readiness(False, reason, model, status.reason, adapters=adapters)
        adapters = tuple(map(AdapterSource.from_message, status.adapters))
        model = model_from_proto(status.model, self._served_name)
        wrong_tokenizer = mismatch(self._tokenizer, model)
        if wrong_tokenizer is not None:
            return Readiness(False, wrong_tokenizer, None)
        if not self._link.is_open:
            reason, why = "the stream to the scheduler is not open", ""
        elif not status.ready:
            reason, why = "no worker is attached", status.reason
        else:
            self._link.handover_ended()
            reason = why = ""
        return Readiness(not reason, reason, model, why, status.policy, adapters)


def is_timeout(error: grpc.aio.AioRpcError) -> bool:
    """True if a call ended for want of time, which says nothing of the peer."""
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def mismatch(tokenizer: Tokenizer, model: ServedModel) -> str | None:
    """Why this tokenizer does not match the model's; None when it does."""
    if model.tokenizer_sha256 and model.tokenizer_sha256 != tokenizer.sha256:
        return (
            f"wrong tokenizer: this gateway's tokenizer.json has SHA-256 {tokenizer.sha256}, "
            f"the worker's has {model.tokenizer_sha256}"
        )
    if tokenizer.vocab_size > model.vocab_size:
        return (
            f"wrong tokenizer: this gateway's has ids up to {tokenizer.vocab_size - 1}, "
            f"the model's vocabulary is {model.vocab_size}"
        )
    return None
