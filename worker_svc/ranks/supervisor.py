"""Supervises the ranks of a tensor-parallel group: starts them and restarts them together.

If a rank ends or sends no heartbeats, the others would wait in collectives forever, so all are
killed and restarted: a new incarnation on the same port, to which the scheduler attaches as to any
restarted worker. A group that fails before it is ready is not restarted. Once a group is ready, the
supervisor imports the ranks' modules, so that later forks start faster; it uses none of them.
"""

import logging
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from wire.logs.setup import set_up_logging
from wire.patience import Patience
from worker_svc.config import WorkerConfig
from worker_svc.process.exit_codes import ExitCode, meaning
from worker_svc.process.heartbeat import BEAT_S, Silence, hear
from worker_svc.ranks import fork
from worker_svc.ranks.fork import RankProcesses

# Before the group is ready: loading may hold the interpreter lock for minutes on a slow disk.
START_SILENCE_S = 300.0
SIGNALS = 64  # read at once; one asks for a drain
MOST_SILENCE = 5.0  # times --rank-timeout-s, where heartbeats are late

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankExit:
    """Event: the process of a rank has ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankMessage:
    """Event: a rank has sent a message."""

    rank: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Reason why a group cannot continue."""

    reason: str
    is_hang: bool


def run(config: WorkerConfig) -> int:
    """Runs the group until a signal, restarting it after a loss; returns the exit code."""
    set_up_logging(config.logs, "worker")
    port = config.port
    with _signals() as signalled:
        while True:
            ranks = fork.start(config, port)
            loss = _watch(ranks, signalled, config.rank_timeout_s)
            if loss is None:
                signalled.recv(SIGNALS)
                return ranks.stop(config.drain_timeout_s, partial(_has_signal, signalled))
            if loss.is_hang:
                ranks.tell_where_they_are()
            ranks.kill()
            if not ranks.is_ready:
                log.error("%s before the group was ready", loss.reason)
                return 1
            log.error("%s: all ranks start again", loss.reason)
            # Rank 0 keeps its port. Injected faults happen in the first incarnation only.
            port, config = ranks.port, replace(config, failpoints=())


def _watch(ranks: RankProcesses, signalled: socket.socket, rank_timeout_s: float) -> Loss | None:
    """Waits until a rank is lost and returns the reason; None if a signal came first."""
    silence = Silence(len(ranks.processes))
    patience = Patience(rank_timeout_s, MOST_SILENCE * rank_timeout_s)
    before_s = time.monotonic()
    with _events(ranks, signalled) as selector:
        while True:
            events = [key.data for key, _ in selector.select(BEAT_S)]
            if None in events:
                return None
            for event in events:
                match event:
                    case RankExit(rank):
                        return _end_of(rank, ranks)
                    case RankMessage(rank):
                        if ranks.is_ready:
                            patience.heard(silence.seconds[rank])
                        _hear(rank, ranks, silence, selector)
            now_s = time.monotonic()
            silence.tick(now_s - before_s)
            patience.fade(now_s - before_s)
            before_s = now_s
            if (loss := _too_silent(ranks, silence, patience.limit_s)) is not None:
                return loss


@contextmanager
def _events(ranks: RankProcesses, signalled: socket.socket) -> Iterator[selectors.BaseSelector]:
    """A selector for ends and messages of ranks; the data of a signal is None."""
    with selectors.DefaultSelector() as selector:
        selector.register(signalled, selectors.EVENT_READ, None)
        for rank, process in enumerate(ranks.processes):
            selector.register(process.sentinel, selectors.EVENT_READ, RankExit(rank))
            selector.register(
                ranks.heartbeat_sockets[rank], selectors.EVENT_READ, RankMessage(rank)
            )
        yield selector


def _end_of(rank: int, ranks: RankProcesses) -> Loss:
    ranks.processes[rank].join()
    code = ranks.processes[rank].exitcode
    return Loss(f"rank {rank} ended with {meaning(code)}", is_hang=code == ExitCode.STEP_OVERDUE)


def _hear(
    rank: int, ranks: RankProcesses, silence: Silence, selector: selectors.BaseSelector
) -> None:
    """Receives a rank's message: a heartbeat or, once from rank 0, the port of the ready group."""
    port = hear(ranks.heartbeat_sockets[rank])
    if port is None:  # the process is ending
        selector.unregister(ranks.heartbeat_sockets[rank])
        return
    silence.heard(rank)
    if port:
        ranks.port = port
        log.info("%d ranks are ready, rank 0 on port %d", len(ranks.processes), port)
        _import_ahead()


def _import_ahead() -> None:
    """Imports the modules of ranks, so that processes forked from now on need not."""
    from worker_svc.ranks import follower  # noqa: F401, PLC0415 - loads torch
    from worker_svc.serving import process  # noqa: F401, PLC0415 - loads torch


def _too_silent(ranks: RankProcesses, silence: Silence, limit_s: float) -> Loss | None:
    if not ranks.is_ready:
        limit_s = max(limit_s, START_SILENCE_S)
    for rank, silent_s in enumerate(silence.seconds):
        if silent_s > limit_s:
            return Loss(f"rank {rank}: no heartbeat for {silent_s:.1f} s", is_hang=True)
    return None


def _has_signal(signalled: socket.socket) -> bool:
    return bool(select.select([signalled], [], [], 0)[0])


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that becomes readable at SIGTERM or SIGINT."""
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    with readable, writable:
        yield readable
        signal.set_wakeup_fd(-1)
