"""Several gateways behind one pair of ports: starts them, replaces the dead, passes signals on.

Each child is a whole gateway with its own stream to the scheduler. The kernel deals out connections
among all who listen on a port with SO_REUSEPORT, so a client's connection belongs to one of them
for as long as it lasts.
"""

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from gateway.config import GatewayConfig
from rpc.server import PortInUse

PR_SET_PDEATHSIG = 1  # linux/prctl.h
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
SETTLED_S = 30.0  # a child that lived so long is replaced at once
KILL_AFTER_S = 10.0  # beyond the grace that a gateway gives its own requests

log = logging.getLogger("gateway.supervisor")


def reserve(host: str, port: int, what: str) -> socket.socket:
    """A socket that holds a port for the children without listening on it; 0 takes a free one.

    Raises PortInUse where somebody listens who does not share.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise PortInUse(f"{what} cannot listen on {host}:{port}: is the port in use?") from error
    return held


def die_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its supervisor is gone, however it went."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Supervisor:
    """Keeps so many children alive until it is told to stop."""

    def __init__(self, command: Sequence[str], num_children: int, grace_s: float) -> None:
        self._command = [*command]
        self._num_children = num_children
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._children: dict[int, asyncio.subprocess.Process] = {}

    def stop(self) -> None:
        """Has every child end as on SIGTERM; nobody is replaced any more."""
        self._stopping.set()
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.terminate()

    async def run(self) -> int:
        """Returns when all children have ended: 0, or 1 if one of them had to be killed or none
        could be started at all."""
        codes = await asyncio.gather(*(self._keep(i) for i in range(self._num_children)))
        return max(codes)

    async def _keep(self, index: int) -> int:
        backoff_s = FIRST_BACKOFF_S
        while True:
            began_s = asyncio.get_running_loop().time()
            child = self._children[index] = await asyncio.create_subprocess_exec(*self._command)
            if self._stopping.is_set():
                child.terminate()
            code = await self._end_of(child)
            if self._stopping.is_set():
                return int(code != 0)
            lived_s = asyncio.get_running_loop().time() - began_s
            if code == 1 and lived_s < SETTLED_S and backoff_s >= MAX_BACKOFF_S:
                log.error("gateway %d cannot be started: it ended with code 1 again", index)
                self.stop()
                return 1
            backoff_s = FIRST_BACKOFF_S if lived_s > SETTLED_S else backoff_s
            log.error("gateway %d ended with code %d after %.1f s: replaced", index, code, lived_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
                return 0
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _end_of(self, child: asyncio.subprocess.Process) -> int:
        ending = asyncio.create_task(child.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        try:
            return await asyncio.wait_for(ending, self._patience_s)
        except TimeoutError:
            child.kill()
            return await child.wait()

    @property
    def _patience_s(self) -> float | None:
        return self._grace_s + KILL_AFTER_S if self._stopping.is_set() else None


async def supervise(config: GatewayConfig, arguments: Sequence[str]) -> int:
    """Runs `config.processes` gateways until SIGTERM or SIGINT; returns the exit code."""
    http = reserve(config.host, config.http_port, "the HTTP API")
    with http, reserve(config.host, config.grpc_port, "the gRPC API") as grpc_port:
        ports = [held.getsockname()[1] for held in (http, grpc_port)]
        # The last of an option that is given twice counts.
        own = ("--processes", "1", "--share-ports")
        where = ("--http-port", str(ports[0]), "--grpc-port", str(ports[1]))
        command = [sys.executable, "-m", "gateway", *arguments, *own, *where]
        supervisor = Supervisor(command, config.processes, config.shutdown_grace_s)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.stop)
        log.info("%d gateways, HTTP on port %d, gRPC on port %d", config.processes, *ports)
        return await supervisor.run()
