"""Supervisor of several gateways on one pair of ports: starts and restarts them.

Each child is a whole gateway with its own stream to the scheduler. The kernel distributes
connections among all processes that listen on a port with SO_REUSEPORT, so a client's connection
belongs to one of them for as long as it lasts. Signals are forwarded to the children.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from gateway.process.config import GatewayConfig
from gateway.process.heartbeats import Heartbeats
from wire.metrics.shared_rows import make_shared_rows
from wire.server import PortInUse

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
SETTLED_S = 30.0  # a child that lived this long is restarted at once
KILL_AFTER_S = 10.0  # after the time that a gateway's own requests have

log = logging.getLogger("gateway.supervisor")


def reserve(host: str, port: int, what: str) -> socket.socket:
    """A socket that reserves a port for the children without listening; 0 takes a free port.

    Raises PortInUse when a process listens there without sharing.
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


class Supervisor:
    """Keeps a number of children alive until stopped."""

    def __init__(self, command: Sequence[str], config: GatewayConfig) -> None:
        self._command = [*command]
        self._num_children = config.processes
        self._drain_timeout_s = config.drain_timeout_s
        self._hang_timeout_s = config.hang_timeout_s
        # What a child has counted outlives it: its successor goes on in the same row.
        self._metrics_fd = make_shared_rows(config.processes)
        self._stopping = asyncio.Event()
        self._children: dict[int, asyncio.subprocess.Process] = {}

    def stop(self) -> None:
        """Sends SIGTERM to every child and restarts none; a second call ends their drain."""
        self._stopping.set()
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.terminate()

    async def run(self) -> int:
        """Runs until all children have ended; returns 0, or 1.

        It is 1 if a child had to be killed or none could be started.
        """
        codes = await asyncio.gather(*(self._keep(i) for i in range(self._num_children)))
        return max(codes)

    async def _keep(self, index: int) -> int:
        backoff_s = FIRST_BACKOFF_S
        while True:
            began_s = asyncio.get_running_loop().time()
            code = await self._run_child(index)
            if self._stopping.is_set():
                return int(code not in (0, -signal.SIGTERM))  # asked to end while it started
            lived_s = asyncio.get_running_loop().time() - began_s
            if code == 1 and lived_s < SETTLED_S and backoff_s >= MAX_BACKOFF_S:
                log.error("gateway %d cannot be started: it ended with code 1 again", index)
                self.stop()
                return 1
            backoff_s = FIRST_BACKOFF_S if lived_s > SETTLED_S else backoff_s
            log.error("gateway %d ended with code %d after %.1f s: replaced", index, code, lived_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
                return 0
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run_child(self, index: int) -> int:
        heartbeats = Heartbeats()
        fd, metrics_fd = heartbeats.write_fd, self._metrics_fd
        # In a session of its own: Ctrl-C would be a second signal besides the one of stop().
        child = self._children[index] = await asyncio.create_subprocess_exec(
            *self._command,
            *("--heartbeat-fd", str(fd)),
            *("--metrics-fd", str(metrics_fd), "--metrics-row", str(index)),
            pass_fds=(fd, metrics_fd),
            start_new_session=True,
        )
        heartbeats.close_write_end()
        if self._stopping.is_set():
            child.terminate()
        try:
            return await self._end_of(index, child, heartbeats)
        finally:
            heartbeats.close()

    async def _end_of(
        self, index: int, child: asyncio.subprocess.Process, heartbeats: Heartbeats
    ) -> int:
        ending = asyncio.create_task(child.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        hanging = asyncio.create_task(heartbeats.silence(self._hang_timeout_s))
        await asyncio.wait((ending, stopping, hanging), return_when=asyncio.FIRST_COMPLETED)
        if hanging.done():
            log.error("gateway %d hangs: silent for %g s", index, self._hang_timeout_s)
            child.kill()
        stopping.cancel()
        hanging.cancel()
        try:
            async with asyncio.timeout(self._patience_s):
                return await ending
        except TimeoutError:
            child.kill()
            return await child.wait()

    @property
    def _patience_s(self) -> float | None:
        return self._drain_timeout_s + KILL_AFTER_S if self._stopping.is_set() else None


async def supervise(config: GatewayConfig, arguments: Sequence[str]) -> int:
    """Runs `config.processes` gateways until SIGTERM or SIGINT; returns the exit code."""
    wanted = {
        "--http-port": (config.http_port, "the HTTP API"),
        "--grpc-port": (config.grpc_port, "the gRPC API"),
        "--health-port": (config.identity.health_port, "the health port"),
        "--metrics-port": (config.identity.metrics_port, "the metrics port"),
    }
    with contextlib.ExitStack() as held:
        ports: dict[str, int] = {}
        for option, (port, what) in wanted.items():
            if port is not None:
                reserved = held.enter_context(reserve(config.host, port, what))
                ports[option] = reserved.getsockname()[1]
        # If an option is given twice, the last one counts.
        own = ("--processes", "1", "--share-ports", "--model", str(config.model))
        where = [word for option, port in ports.items() for word in (option, str(port))]
        command = [sys.executable, "-m", "gateway", *arguments, *own, *where]
        supervisor = Supervisor(command, config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.stop)
        log.info(
            "%d gateways, HTTP on port %d, gRPC on port %d",
            config.processes,
            *list(ports.values())[:2],
        )
        return await supervisor.run()
