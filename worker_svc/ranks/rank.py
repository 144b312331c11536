"""One rank of a group, in a process forked by the supervisor.

It loads torch unless the supervisor has loaded it already. Preparations that need no torch begin
first.
"""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from wire.processes import die_with_parent
from worker_svc.config import WorkerConfig
from worker_svc.process import exit_codes
from worker_svc.process.heartbeat import RankHeartbeat
from worker_svc.process.pipe import MessagePipe
from worker_svc.startup import precompile, preload
from worker_svc.startup.precompile import Precompile

if TYPE_CHECKING:
    from worker_svc.parallel.leader import Ranks
    from worker_svc.serving.server import RankServer


def run(
    rank: int,
    config: WorkerConfig,
    heartbeat_socket: socket.socket,
    orders: Sequence[socket.socket],
) -> int:
    """Serves until the supervisor stops it or ends; returns the exit code."""
    _be_on_its_own()
    line = RankHeartbeat(heartbeat_socket)
    line.start()
    compiling = None
    if rank == 0 and config.model is not None:
        compiling = precompile.start(config, config.model)
    preload.begin(config, rank)
    from worker_svc.parallel.leader import Ranks  # noqa: PLC0415
    from worker_svc.serving import process  # noqa: PLC0415

    size = config.tensor_parallel_size
    ranks = Ranks(rank, size, [MessagePipe(order) for order in orders])
    return process.run(config, partial(_server, config, ranks, line, compiling), rank, size)


def _be_on_its_own() -> None:
    os.setsid()  # the supervisor passes terminal signals on
    # A rank that is stopped, or waits in a collective, would not notice that its line is closed.
    die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    exit_codes.prepare()


def _server(
    config: WorkerConfig,
    ranks: "Ranks",
    heartbeat: RankHeartbeat,
    compiling: Precompile | None,
    on_failure: Callable[[], None],
) -> "RankServer":
    from worker_svc.ranks.follower import Follower  # noqa: PLC0415
    from worker_svc.serving.server import WorkerServer  # noqa: PLC0415

    if ranks.rank > 0:
        return Follower(config, on_failure, ranks)

    def tell_port() -> None:
        heartbeat.say_ready(server.port)

    server = WorkerServer(config, on_failure, ranks, tell_port, compiling)
    return server
