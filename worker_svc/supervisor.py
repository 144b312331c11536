"""The process in front of several ranks: starts them, ends them together, starts them again.

A rank that dies or falls silent leaves the others in collectives that nobody finishes, so these are
ended at once and all begin anew: a new incarnation on the same port, which the scheduler attaches
to as to any worker that comes back. A group that dies before it was ready would do so again, and is
not started again. Does not load torch.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from worker_svc.ending import WHERE_ARE_YOU, Ending, meaning
from worker_svc.lifeline import BEAT_S, Silence, hear, make_pair

STOP_S = 10.0
START_SILENCE_S = 60.0
LAST_WORDS_S = 0.3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """An event: the process of a rank has ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class Spoke:
    """An event: a rank has said something."""

    rank: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a group cannot go on."""

    reason: str
    is_hang: bool


@dataclass(slots=True)
class Ranks:
    """The processes of one incarnation. Each notices when this one dies: its lifeline ends."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lifelines: list[socket.socket] = field(default_factory=list)
    port: int = 0  # of rank 0, once it is ready; 0 before

    @property
    def is_ready(self) -> bool:
        return self.port > 0

    def kill(self) -> None:
        """Ends all of them now: what they hold can be rebuilt."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for lifeline in self.lifelines:
            lifeline.close()

    def tell_where_they_are(self) -> None:
        """Has each rank that still can log where its threads stand; no interpreter is asked."""
        for process in self.processes:
            process.send_signal(WHERE_ARE_YOU)  # nothing, if it has ended
        time.sleep(LAST_WORDS_S)

    def stop(self) -> int:
        """Asks all of them to end, and sees to it; returns the exit code of rank 0."""
        for process in self.processes:
            process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("process %d does not stop", process.pid)
        code = self.processes[0].poll()
        self.kill()
        return 1 if code is None else code


def run(size: int, arguments: Sequence[str], rank_timeout_s: float) -> int:
    """Keeps a group of ranks running until a signal, or until it cannot start."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    port = 0
    with _signals() as signalled:
        while True:
            ranks = _start(size, arguments, port)
            loss = _watch(ranks, signalled, rank_timeout_s)
            if loss is None:
                return ranks.stop()
            if loss.is_hang:
                ranks.tell_where_they_are()
            ranks.kill()
            if not ranks.is_ready:
                log.error("%s before the group was ready", loss.reason)
                return 1
            log.error("%s: all ranks start again", loss.reason)
            port, arguments = ranks.port, _without_failpoints(arguments)


def _start(size: int, arguments: Sequence[str], port: int) -> Ranks:
    """All processes, and a socket from rank 0 to each of the others. Rank 0 listens on the port
    that it had before, if there was one; the last of an option counts."""
    same_port = ["--port", str(port)] if port else []
    ranks = Ranks()
    with ExitStack() as ours:  # their ends of the sockets: nobody else may hold them open
        pairs = [socket.socketpair() for _ in range(size - 1)]
        for end in (end for pair in pairs for end in pair):
            ours.enter_context(end)
        sockets = [[leading for leading, _ in pairs], *([following] for _, following in pairs)]
        for rank in range(size):
            lifeline, theirs = make_pair()
            ours.enter_context(theirs)
            ranks.lifelines.append(lifeline)
            options = [*arguments, *same_port] if rank == 0 else arguments
            ranks.processes.append(_start_rank(rank, size, theirs, sockets[rank], options))
            log.info("rank %d is process %d", rank, ranks.processes[rank].pid)
    return ranks


def _without_failpoints(arguments: Sequence[str]) -> list[str]:
    """Each fault that tests order is to happen once, and not once to every group."""
    after = zip(["", *arguments], arguments, strict=False)
    option = "--failpoint"
    return [part for before, part in after if part.partition("=")[0] != option and before != option]


def _start_rank(
    rank: int,
    size: int,
    lifeline: socket.socket,
    sockets: Sequence[socket.socket],
    arguments: Sequence[str],
) -> subprocess.Popen[bytes]:
    orders = [end.fileno() for end in sockets]
    command = [sys.executable, "-m", "worker_svc.rank", "--rank", str(rank), "--size", str(size)]
    command += ["--lifeline", str(lifeline.fileno()), "--orders", ",".join(map(str, orders))]
    return subprocess.Popen(
        [*command, "--", *arguments],
        pass_fds=[lifeline.fileno(), *orders],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a signal from the terminal comes by way of this process
    )


def _watch(ranks: Ranks, signalled: socket.socket, rank_timeout_s: float) -> Loss | None:
    """Waits until a rank is lost, and returns how; None: a signal came first."""
    silence = Silence(len(ranks.processes))
    before_s = time.monotonic()
    with _events(ranks, signalled) as selector:
        while True:
            events = [key.data for key, _ in selector.select(BEAT_S)]
            if None in events:
                return None
            for event in events:
                match event:
                    case Ended(rank):
                        return _end_of(rank, ranks)
                    case Spoke(rank):
                        _hear(rank, ranks, silence, selector)
            now_s = time.monotonic()
            silence.tick(now_s - before_s)
            before_s = now_s
            if (loss := _too_silent(ranks, silence, rank_timeout_s)) is not None:
                return loss


@contextmanager
def _events(ranks: Ranks, signalled: socket.socket) -> Iterator[selectors.BaseSelector]:
    """What may happen to a group; a signal comes without data."""
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        selector.register(signalled, selectors.EVENT_READ, None)
        for rank, process in enumerate(ranks.processes):
            pidfd = os.pidfd_open(process.pid)
            opened.callback(os.close, pidfd)
            selector.register(pidfd, selectors.EVENT_READ, Ended(rank))
            selector.register(ranks.lifelines[rank], selectors.EVENT_READ, Spoke(rank))
        yield selector


def _end_of(rank: int, ranks: Ranks) -> Loss:
    code = ranks.processes[rank].wait()
    return Loss(f"rank {rank} ended with {meaning(code)}", is_hang=code == Ending.STEP_OVERDUE)


def _hear(rank: int, ranks: Ranks, silence: Silence, selector: selectors.BaseSelector) -> None:
    """Most often a sign of life. Rank 0 says, once, that the group is ready, and its port."""
    port = hear(ranks.lifelines[rank])
    if port is None:  # its process is about to end
        selector.unregister(ranks.lifelines[rank])
        return
    silence.heard(rank)
    if port:
        ranks.port = port
        log.info("%d ranks are ready, rank 0 on port %d", len(ranks.processes), port)


def _too_silent(ranks: Ranks, silence: Silence, rank_timeout_s: float) -> Loss | None:
    # What start-up calls may hold the interpreter for seconds.
    limit_s = rank_timeout_s if ranks.is_ready else max(rank_timeout_s, START_SILENCE_S)
    for rank, silent_s in enumerate(silence.seconds):
        if silent_s > limit_s:
            return Loss(f"rank {rank}: no sign of life for {silent_s:.1f} s", is_hang=True)
    return None


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that becomes readable when the process is asked to stop."""
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    with readable, writable:
        yield readable
        signal.set_wakeup_fd(-1)
