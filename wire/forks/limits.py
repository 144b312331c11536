"""Limits of one piece of work, applied to the process that does it, and in words.

The numbers are those of grammars.
"""

import contextlib
import os
import resource
import signal
from dataclasses import dataclass

# In seconds and MiB; a grammar within them is read a second time by the worker's own threads, on a
# stack sixteen times as large (`worker_svc/sampling/matcher_threads.py`).
CPU_S = 5
QUICK_S = 0.1  # of CPU; what takes longer is checked apart from the others
WALL_S = 300  # on a machine that has other things to do, 5 s of CPU may take minutes
MEMORY_MIB = 512
STACK_MIB = 4
SLOW_SIGNAL = signal.SIGPROF  # ends a quick check that takes longer
NICENESS = 10  # what answers requests comes first
QUICK_NICENESS = 5  # and quick checks before full ones


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Bounds of one piece of work: seconds of CPU and in all, MiB of new memory and of stack."""

    cpu_s: int = CPU_S
    quick_s: float = QUICK_S
    wall_s: float = WALL_S
    memory_mib: int = MEMORY_MIB
    stack_mib: int = STACK_MIB
    what: str = "the grammar"  # is worked on, for reasons

    def apply(self, *, is_quick: bool = False) -> None:
        """Limits this process, to be called once after a fork; the system kills it beyond them."""
        for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if is_quick:
            signal.signal(SLOW_SIGNAL, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, self.quick_s)
        signal.setitimer(signal.ITIMER_REAL, self.wall_s)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, self.cpu_s)
        _limit(resource.RLIMIT_STACK, self.stack_mib << 20)
        _limit(resource.RLIMIT_AS, _address_space_bytes() + (self.memory_mib << 20))

    def reason(self, signal_number: int) -> str:
        """Why a check ended with this signal."""
        match signal_number:
            case signal.SIGSEGV | signal.SIGBUS:
                return f"{self.what} is nested too deeply"
            case signal.SIGXCPU:
                return f"{self.what} needs more than {self.cpu_s} s of CPU time to be read"
            case signal.SIGALRM:
                return f"{self.what} needs more than {self.wall_s:g} s to be read"
            case signal.SIGABRT | signal.SIGKILL:
                return f"{self.what} needs more than {self.memory_mib} MiB of memory"
            case _:
                return f"{self.what} ended the process that read it (signal {signal_number})"


def give_way(niceness: int = NICENESS) -> None:
    """Lets everything else on the machine run before this process, which leads a session.

    Where the kernel shares time between sessions first (autogroups), niceness counts only within
    one, so the session gets it, too.
    """
    os.nice(niceness - os.nice(0))
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(niceness))


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    # A soft limit alone: at the hard limit of CPU time the signal would be SIGKILL.
    resource.setrlimit(what, (most, hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
