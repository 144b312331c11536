"""Pulls blocks from other workers, apart from the steps.

Each peer has a thread of its own while it is asked, so that one that is slow or gone delays no pull
from another. A pull that fails, in whatever way, is an answer with the blocks that are whole.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from worker_svc.moves.staging import block_bytes
from worker_svc.moves.transport import KvTransport, OwnKv, PeerSource, PullEnd
from worker_svc.protocol.transfers import Peer, PeerOrder, TransferEnd

IDLE_S = 60.0  # without a pull, after which a peer's connection is closed

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pull:
    """One order that is not answered."""

    order: PeerOrder
    is_over: Callable[[], bool]
    answer: Callable[[int, TransferEnd], None]
    asked_s: float
    is_cancelled: bool = False

    def should_end(self) -> bool:
        """True if its answer is not awaited any more."""
        return self.is_cancelled or self.is_over()


class PeerFetches:
    """The pulls of one worker, and its own blocks for those of others."""

    def __init__(self, transports: Mapping[str, KvTransport]) -> None:
        self._transports = transports
        self._block_bytes = 0
        self._lock = threading.Lock()
        self._open: set[_Pull] = set()
        self._waits: list[tuple[set[_Pull], Callable[[], None]]] = []
        self._lanes: dict[Peer, _Lane] = {}
        self._failures: set[str] = set()  # that were logged

    def begin(self, kv: OwnKv) -> dict[str, bytes]:
        """Lets others read the cache from now on; returns the handle of each transport."""
        self._block_bytes = block_bytes(kv.cache)
        return {name: transport.expose(kv) for name, transport in self._transports.items()}

    def submit(
        self,
        order: PeerOrder,
        is_over: Callable[[], bool],
        answer: Callable[[int, TransferEnd], None],
    ) -> None:
        """Queues a pull; `answer` is called once, from a thread of the peer.

        It ends early once `is_over` says so.
        """
        pull = _Pull(order, is_over, answer, time.perf_counter())
        with self._lock:
            self._open.add(pull)
            lane = self._lanes.get(order.peer)
            if lane is None:
                lane = self._lanes[order.peer] = _Lane(self, order.peer)
            lane.inbox.put(pull)

    def cancel(self, transfer_ids: tuple[int, ...]) -> None:
        """Ends pulls early; those that are answered already are none."""
        with self._lock:
            for pull in self._open:
                pull.is_cancelled |= pull.order.transfer_id in transfer_ids

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls once all pulls that were submitted have ended."""
        with self._lock:
            if self._open:
                self._waits.append((set(self._open), call))
                return
        call()

    def close(self) -> None:
        """Lets no other worker read blocks here any more."""
        for transport in self._transports.values():
            transport.close()

    # --- for a peer's thread ---------------------------------------------------------------------

    def connect(self, peer: Peer) -> PeerSource:
        """Connects to a peer. Raises what its transport does."""
        transport = self._transports.get(peer.transport)
        if transport is None:
            raise LookupError(f"there is no transport {peer.transport!r}")
        return transport.connect(peer)

    def end(self, pull: _Pull, done: PullEnd, begun_s: float) -> None:
        """Answers a pull."""
        queued_s, duration_s = begun_s - pull.asked_s, time.perf_counter() - begun_s
        num_bytes = done.num_blocks * self._block_bytes
        end = TransferEnd(done.num_blocks, done.problem, num_bytes, duration_s, queued_s)
        if done.problem and not pull.should_end() and done.problem not in self._failures:
            self._failures.add(done.problem)
            log.warning("blocks of worker %s: %s", pull.order.peer.address, done.problem)
        pull.answer(pull.order.transfer_id, end)
        with self._lock:
            self._open.discard(pull)
            for waited, _ in self._waits:
                waited.discard(pull)
            due = [call for waited, call in self._waits if not waited]
            self._waits = [one for one in self._waits if one[0]]
        for call in due:
            call()

    def leave(self, lane: "_Lane") -> bool:
        """Forgets a peer that was not asked for long; False if it is asked now."""
        with self._lock:
            if not lane.inbox.empty():
                return False
            del self._lanes[lane.peer]
            return True


class _Lane:
    """The thread of one peer, and its connection."""

    def __init__(self, fetches: PeerFetches, peer: Peer) -> None:
        self.peer = peer
        self.inbox: SimpleQueue[_Pull] = SimpleQueue()
        self._fetches = fetches
        self._source: PeerSource | None = None
        threading.Thread(target=self._run, name="kv-pull", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                pull = self.inbox.get(timeout=IDLE_S)
            except Empty:
                self._drop()
                if self._fetches.leave(self):
                    return
                continue
            begun_s = time.perf_counter()
            self._fetches.end(pull, self._pulled(pull), begun_s)

    def _pulled(self, pull: _Pull) -> PullEnd:
        """Makes a pull, once more if a connection that stood open turns out to be none."""
        stood_open = self._source is not None
        done = self._tried(pull)
        if stood_open and done.problem and not done.num_blocks and not pull.should_end():
            done = self._tried(pull)
        return done

    def _tried(self, pull: _Pull) -> PullEnd:
        order = pull.order
        try:
            if pull.should_end():
                return PullEnd(0, "it was cancelled")
            if self._source is None:
                self._source = self._fetches.connect(self.peer)
            transfer = self._source.fetch(order.source_block_ids, order.block_ids)
            while (done := transfer.poll()) is None:
                if pull.should_end():
                    transfer.cancel()
        except (
            Exception
        ) as error:  # of a connection, or of a plug-in: what is not whole is computed
            done = PullEnd(0, f"{type(error).__name__}: {error}")
        if done.problem:
            self._drop()
        return done

    def _drop(self) -> None:
        """Closes the connection: an answer to what was cancelled may be on its way."""
        source, self._source = self._source, None
        if source is not None:
            try:
                source.close()
            except Exception:  # a plug-in's
                log.exception("a connection to worker %s", self.peer.address)
