"""Heartbeats between a rank and the supervisor over a socket; each detects the other's end.

A rank sends heartbeats from a thread that never waits for a device. They stop if the rank is
suspended or its interpreter hangs. If the supervisor ends in any way, the rank's end of the socket
closes and the rank ends too. This module does not load torch.
"""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

BEAT_S = 0.5
# Silence is counted in ticks of at most this length, since the supervisor may be suspended itself.
LONGEST_TICK_S = 2 * BEAT_S
_BEAT = b"."


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Returns a connected pair of message sockets: the supervisor's end, the rank's end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class RankHeartbeat:
    """The rank's end of the heartbeat socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(BEAT_S)

    def start(self) -> None:
        """Starts the thread that sends heartbeats and ends this process with the supervisor."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def say_ready(self, port: int) -> None:
        """Reports that the group is ready on this port; called once, by rank 0."""
        self._socket.sendall(str(port).encode())

    def _beat(self) -> None:
        while not self._has_ended():
            with suppress(OSError):  # the buffer of a suspended supervisor is full
                self._socket.send(_BEAT)
        os._exit(1)

    def _has_ended(self) -> bool:
        """Waits for one interval; True if the socket closed, since the supervisor sends nothing."""
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:  # closed with heartbeats unread
            return True
        return True


def hear(line: socket.socket) -> int | None:
    """Receives a message: the port of a ready group, 0 for a heartbeat, None at the end."""
    said = line.recv(16)
    if not said:
        return None
    return 0 if said == _BEAT else int(said)


class Silence:
    """Duration of each rank's silence in seconds; reads no clock."""

    def __init__(self, num_ranks: int) -> None:
        self._seconds = [0.0] * num_ranks

    def heard(self, rank: int) -> None:
        """Resets the silence of a rank that has sent a message."""
        self._seconds[rank] = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Adds the elapsed time, after the messages of that time have been recorded."""
        elapsed_s = min(elapsed_s, LONGEST_TICK_S)
        self._seconds = [seconds + elapsed_s for seconds in self._seconds]

    @property
    def seconds(self) -> Sequence[float]:
        """Seconds of silence, by rank."""
        return self._seconds
