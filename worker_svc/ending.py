"""How a worker's process ends itself where only a new one can go on, and what its exit code says.

The scheduler keeps every request, so an end is a pause. To stay would be worse: a device that is
lost answers every step with an error, and a step that hangs is never answered.
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


class Ending(IntEnum):
    """Exit codes of a process that ends itself to be restarted."""

    RANKS_APART = 70  # ranks stand at different places and cannot go on together
    DEVICE_LOST = 71  # every call of the device fails until its context is made anew
    STEP_OVERDUE = 72  # a step took longer than --step-limit-s


def prepare() -> None:
    """Has this process say where its threads stand when it is asked to, or crashes."""
    faulthandler.enable()
    faulthandler.register(WHERE_ARE_YOU)


def end_process(ending: Ending, reason: str, with_stacks: bool = False) -> NoReturn:
    """Logs the reason and ends this process now.

    No clean-up: a collective that no other rank enters, or a device that does not answer, would
    block it forever. Nor may the last log lines, where no process reads the log.
    """
    deadline = threading.Timer(LAST_WORDS_S, os._exit, (int(ending),))
    deadline.daemon = True
    deadline.start()
    log.critical("%s: this process ends with %d, %s", reason, ending, ending.name)
    if with_stacks:
        faulthandler.dump_traceback()
    logging.shutdown()
    os._exit(ending)


def meaning(code: int | None) -> str:
    """An exit code in words."""
    return f"{code}, {Ending(code).name}" if code in set(Ending) else str(code)
