"""Heartbeats by which each of several gateways shows its supervisor that its event loop runs.

A gateway writes a byte to a pipe at short intervals from its event loop. One that is stopped, or
whose loop stands still, writes none: its listening sockets would keep taking connections that
no one answers.
"""

import asyncio
import contextlib
import os

INTERVAL_S = 0.5
_LONGEST_TICK_S = 1.0  # a longer one means that this process stood still itself


async def beat(fd: int | None) -> None:
    """Writes a byte per interval, for ever; a pipe that is full or closed is left alone.

    Without a pipe there is no supervisor to hear it.
    """
    if fd is None:
        return
    os.set_blocking(fd, False)
    while True:
        with contextlib.suppress(OSError):
            os.write(fd, b".")
        await asyncio.sleep(INTERVAL_S)


class Heartbeats:
    """The supervisor's end of one gateway's pipe. The gateway inherits `write_fd`."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)

    def close_write_end(self) -> None:
        """Call it once the gateway has started: its end is its own then."""
        os.close(self.write_fd)

    def close(self) -> None:
        """Stops listening."""
        os.close(self._read_fd)

    async def silence(self, limit_s: float) -> None:
        """Returns once the gateway was silent for longer than the limit, in seconds.

        Starting up takes as long as it takes: silence counts from the first byte on.
        """
        loop = asyncio.get_running_loop()
        while not self._heard():
            await asyncio.sleep(INTERVAL_S)
        silent_s, before_s = 0.0, loop.time()
        while silent_s <= limit_s:
            await asyncio.sleep(INTERVAL_S)
            now_s = loop.time()
            silent_s = 0.0 if self._heard() else silent_s + min(now_s - before_s, _LONGEST_TICK_S)
            before_s = now_s

    def _heard(self) -> bool:
        try:
            return bool(os.read(self._read_fd, 1024))
        except BlockingIOError:
            return False
