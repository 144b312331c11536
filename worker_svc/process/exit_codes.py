"""Exit codes of a worker that ends itself because only a new process can continue.

The scheduler keeps all requests, so the end of a worker only delays them. Continuing would be
worse: a lost device fails every step, and a hanging step is never answered.
"""

import faulthandler
import logging
import os
import signal
import threading
from enum import IntEnum
from typing import NoReturn

LAST_WORDS_S = 2.0
WHERE_ARE_YOU = signal.SIGUSR2

log = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """Exit codes of a process that ends itself to be restarted."""

    RANKS_APART = 70  # ranks disagree on their state and cannot continue together
    DEVICE_LOST = 71  # every call of the device fails until it has a new context
    STEP_OVERDUE = 72  # a step took longer than --step-limit-s


def prepare() -> None:
    """Makes this process print the stacks of its threads on a signal or a crash."""
    faulthandler.enable()
    faulthandler.register(WHERE_ARE_YOU)


def end_process(code: ExitCode, reason: str, with_stacks: bool = False) -> NoReturn:
    """Logs the reason and ends this process immediately, with the exit code `code`.

    There is no clean-up: a collective that no other rank enters, or a device that does not answer,
    would block it forever. A timer ends the process even if the last log lines block.
    """
    deadline = threading.Timer(LAST_WORDS_S, os._exit, (int(code),))
    deadline.daemon = True
    deadline.start()
    log.critical("%s: this process ends with %d, %s", reason, code, code.name)
    if with_stacks:
        faulthandler.dump_traceback()
    logging.shutdown()
    os._exit(code)


def meaning(code: int | None) -> str:
    """Returns an exit code as text, with its name."""
    return f"{code}, {ExitCode(code).name}" if code in set(ExitCode) else str(code)
