"""Forks the processes of a group from a supervisor that has imported their modules.

Imports take most of a start, and requests wait while a group restarts. Forking is safe as long as
the supervisor computes nothing, uses no device and has no thread that could hold a lock.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.context import ForkProcess

from worker_svc.config import WorkerConfig
from worker_svc.process.exit_codes import WHERE_ARE_YOU
from worker_svc.process.heartbeat import make_pair
from worker_svc.ranks.rank import run

STOP_S = 10.0
DRAIN_POLL_S = 0.1
LAST_WORDS_S = 0.3
FORK = get_context("fork")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankProcesses:
    """The rank processes of one incarnation. Each ends when the supervisor ends."""

    processes: list[ForkProcess] = field(default_factory=list)
    heartbeat_sockets: Sequence[socket.socket] = ()
    port: int = 0  # of rank 0; 0 until the group is ready

    @property
    def is_ready(self) -> bool:
        return self.port > 0

    def kill(self) -> None:
        """Kills all ranks; the scheduler can rebuild their state."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        _close(self.heartbeat_sockets)

    def tell_where_they_are(self) -> None:
        """Makes each rank log its threads' stacks, by a signal that needs no Python interpreter."""
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, WHERE_ARE_YOU)
        time.sleep(LAST_WORDS_S)

    def stop(self, drain_timeout_s: float, is_hurried: Callable[[], bool]) -> int:
        """Stops all ranks, by force if needed; returns the exit code of rank 0.

        Rank 0 ends first: it serves a scheduler while it drains, and needs the others for that. A
        signal ends the drain: `is_hurried` says whether one has come.
        """
        leader = self.processes[0]
        leader.terminate()
        drained_s = time.monotonic() + drain_timeout_s + STOP_S
        while time.monotonic() < drained_s and all(p.exitcode is None for p in self.processes):
            leader.join(DRAIN_POLL_S)
            if is_hurried():
                break
        for process in self.processes:
            process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.exitcode is None:
                log.warning("%s does not stop", process.name)
        code = self.processes[0].exitcode
        self.kill()
        return 1 if code is None else code


def start(config: WorkerConfig, port: int) -> RankProcesses:
    """Forks all ranks, each with a heartbeat socket.

    Rank 0 listens on `port` and has a socket to each other rank.
    """
    size = config.tensor_parallel_size
    heartbeat_sockets = [make_pair() for _ in range(size)]
    pairs = [socket.socketpair() for _ in range(size - 1)]
    orders = [[leading for leading, _ in pairs], *([following] for _, following in pairs)]
    theirs = [[line, *orders[rank]] for rank, (_, line) in enumerate(heartbeat_sockets)]
    ours = [line for line, _ in heartbeat_sockets]
    ranks = RankProcesses(heartbeat_sockets=ours)
    for rank in range(size):
        others = [*ours, *(end for ends in theirs if ends is not theirs[rank] for end in ends)]
        options = config if rank else replace(config, port=port)
        arguments = (rank, options, theirs[rank], others)
        process = FORK.Process(target=_be_rank, args=arguments, name=f"rank {rank}")
        process.start()
        log.info("rank %d is process %d", rank, process.pid)
        ranks.processes.append(process)
    _close(end for ends in theirs for end in ends)
    return ranks


def _be_rank(
    rank: int,
    config: WorkerConfig,
    ours: Sequence[socket.socket],
    others: Sequence[socket.socket],
) -> None:
    """Runs a rank in the new process, after closing the inherited sockets of other ranks."""
    _close(others)
    heartbeat_socket, *orders = ours
    sys.exit(run(rank, config, heartbeat_socket, orders))


def _close(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        end.close()
