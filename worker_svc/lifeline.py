"""The socket between a rank and the supervisor: each learns of it when the other is no more.

A rank says a few times a second that it lives, from a thread that waits for no device; a rank that
is stopped, or whose interpreter hangs, falls silent. Its end of the socket closes with the
supervisor, however that died, and the rank ends too. Does not load torch.
"""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

BEAT_S = 0.5
# A supervisor that was stopped itself cannot say how long others were silent.
LONGEST_TICK_S = 2 * BEAT_S
_BEAT = b"."


def make_pair() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end and the rank's; what is sent at once arrives at once."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Lifeline:
    """The rank's end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(BEAT_S)

    def start(self) -> None:
        """Beats from now on, and ends this process with the supervisor."""
        threading.Thread(target=self._beat, name="lifeline", daemon=True).start()

    def say_ready(self, port: int) -> None:
        """Of rank 0, once: the group is ready, and this is where it answers."""
        self._socket.sendall(str(port).encode())

    def _beat(self) -> None:
        while not self._has_ended():
            with suppress(OSError):  # a supervisor that is stopped reads nothing
                self._socket.send(_BEAT)
        os._exit(1)

    def _has_ended(self) -> bool:
        """Waits for a beat's time; nothing is ever sent, so what comes is the end."""
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:  # closed with beats unread
            return True
        return True


def hear(line: socket.socket) -> int | None:
    """What a rank has said: the port of a group that is ready, 0 for a sign of life, None at the
    end."""
    said = line.recv(16)
    if not said:
        return None
    return 0 if said == _BEAT else int(said)


class Silence:
    """How long each rank has said nothing; knows no clock."""

    def __init__(self, num_ranks: int) -> None:
        self._seconds = [0.0] * num_ranks

    def heard(self, rank: int) -> None:
        """A rank has said something."""
        self._seconds[rank] = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Time passes; what has come meanwhile was heard before."""
        elapsed_s = min(elapsed_s, LONGEST_TICK_S)
        self._seconds = [seconds + elapsed_s for seconds in self._seconds]

    @property
    def seconds(self) -> Sequence[float]:
        """By rank."""
        return self._seconds
