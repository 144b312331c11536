"""Follows the addresses of a name: looks it up again and again, off the event loop.

Each address is a worker group. What no answer says for a while is drained; a lookup that fails,
hangs or finds nothing says nothing, so everything stays as it is.
"""

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable

from scheduler_svc.discovery.members import Members, TooManyWorkers

GONE_AFTER = 2  # answers in a row without an address; one may have been cut short
LOOKUP_S = 10.0  # after which a lookup counts as hanging
_JITTER = 0.2  # of the period, so that schedulers do not ask in step

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], frozenset[str]]  # blocks; raises OSError


def resolve(name: str, port: int) -> frozenset[str]:
    """The addresses of a name as host:port. Blocks; raises OSError."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is too long
        raise OSError(str(error)) from error
    hosts = {str(address[0]) for *_, address in found}
    return frozenset(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class NameWatch:
    """One name of --worker-dns."""

    def __init__(
        self, name: str, members: Members, period_s: float, resolve: Resolve = resolve
    ) -> None:
        host, _, port = name.rpartition(":")
        self.source = f"--worker-dns {name}"
        self._host, self._port = host, int(port)
        self._members = members
        self._period_s = period_s
        self._resolve = resolve
        self._pending: asyncio.Future[frozenset[str]] | None = None
        self._num_missed: dict[str, int] = {}  # answers in a row, by address
        self._problem = ""
        self._has_too_many = False

    async def run(self) -> None:
        """Follows the name until cancelled."""
        while True:
            found = await self._look_up()
            if found:
                self._follow(found)
            low, high = 1 - _JITTER, 1 + _JITTER
            await asyncio.sleep(self._period_s * random.uniform(low, high))

    async def _look_up(self) -> frozenset[str]:
        """The addresses; none when there is no answer. At most one lookup runs."""
        pending = self._pending = self._pending or self._begin()
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await asyncio.shield(pending)
        except TimeoutError:
            self._tell(f"no answer for {LOOKUP_S:g} s")
            return frozenset()
        except OSError as error:
            self._pending = None
            self._tell(str(error))
            return frozenset()
        self._pending = None
        self._tell("" if found else "the answer is empty")
        return found

    def _begin(self) -> asyncio.Future[frozenset[str]]:
        """Starts a lookup in a thread of its own, which the end of the process does not await."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[frozenset[str]] = loop.create_future()

        def settle(found: frozenset[str] | None, error: OSError | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(found or frozenset())

        def work() -> None:
            found, problem = None, None
            try:
                found = self._resolve(self._host, self._port)
            except OSError as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, found, problem)

        threading.Thread(target=work, name=f"lookup-{self._host}", daemon=True).start()
        return future

    def _tell(self, problem: str) -> None:
        """Logs a problem once, and its end."""
        if problem and problem != self._problem:
            logger.warning("%s: %s; its workers stay as they are", self.source, problem)
        elif self._problem and not problem:
            logger.info("%s: is answered again", self.source)
        self._problem = problem

    def _follow(self, found: frozenset[str]) -> None:
        known = self._members.named_by(self.source)
        for address in sorted(found - known):
            try:
                self._members.join(address, self.source, server_name=self._host)
            except TooManyWorkers as error:
                if not self._has_too_many:
                    logger.warning("%s: %s", self.source, error)
                self._has_too_many = True
                break
        for address in sorted(known - found):
            self._num_missed[address] = self._num_missed.get(address, 0) + 1
            if self._num_missed[address] >= GONE_AFTER:
                self._members.leave(address, self.source, f"{self._host} does not name it any more")
        self._num_missed = {
            address: count
            for address, count in self._num_missed.items()
            if address not in found and count < GONE_AFTER
        }
