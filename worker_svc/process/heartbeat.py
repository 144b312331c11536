"""Heartbeats over a socket between a rank and the supervisor, which both use to detect an end.

A rank sends a heartbeat several times a second, from a thread that never waits for a device; a rank
that is stopped, or whose interpreter hangs, falls silent. Its end of the socket closes when the
supervisor ends in any way, and the rank then ends too. This module does not load torch.
"""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

BEAT_S = 0.5
# A supervisor that was suspended itself cannot say how long ranks were silent.
LONGEST_TICK_S = 2 * BEAT_S
_BEAT = b"."


def make_pair() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end and the rank's, without delays in sending."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Lifeline:
    """The rank's end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(BEAT_S)

    def start(self) -> None:
        """Starts heartbeats, and ends this process with the supervisor."""
        threading.Thread(target=self._beat, name="lifeline", daemon=True).start()

    def say_ready(self, port: int) -> None:
        """Reports, once and by rank 0, that the group is ready on this port."""
        self._socket.sendall(str(port).encode())

    def _beat(self) -> None:
        while not self._has_ended():
            with suppress(OSError):  # a suspended supervisor reads nothing
                self._socket.send(_BEAT)
        os._exit(1)

    def _has_ended(self) -> bool:
        """Waits for one interval; any event is the end, since nothing is ever sent."""
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:  # closed with heartbeats unread
            return True
        return True


def hear(line: socket.socket) -> int | None:
    """A rank's message: the port of a ready group, 0 for a heartbeat, None at the end."""
    said = line.recv(16)
    if not said:
        return None
    return 0 if said == _BEAT else int(said)


class Silence:
    """Seconds of silence per rank; reads no clock."""

    def __init__(self, num_ranks: int) -> None:
        self._seconds = [0.0] * num_ranks

    def heard(self, rank: int) -> None:
        """Records a message of a rank."""
        self._seconds[rank] = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Advances the time; messages that arrived in between were recorded before."""
        elapsed_s = min(elapsed_s, LONGEST_TICK_S)
        self._seconds = [seconds + elapsed_s for seconds in self._seconds]

    @property
    def seconds(self) -> Sequence[float]:
        """Seconds of silence, by rank."""
        return self._seconds
