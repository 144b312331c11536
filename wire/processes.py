"""The tie of a process to the one that started it."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send a signal to this process when its parent ends in any way.

    The parent is the thread that forked this process. Only Linux can do it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
