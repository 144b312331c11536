"""Threads that read grammars: with a large stack, and after everything else on the machine.

Reading recurses with a grammar's nesting, and a stack that overflows ends the process. Only
grammars come here that a checking process has read on a sixteenth of this stack
(`wire.forks.limits`).
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from wire.forks.limits import NICENESS, STACK_MIB

_STACK_BYTES = 16 * STACK_MIB << 20  # of address space; memory is taken as it is used


def large_stack_threads(number: int, name: str, *, is_nice: bool) -> ThreadPoolExecutor:
    """A pool whose threads all run already; nice ones give way to steps."""
    pool = ThreadPoolExecutor(number, name, initializer=_be_nice if is_nice else None)
    everyone_runs = threading.Barrier(number)
    before = threading.stack_size(_STACK_BYTES)
    try:
        started = [pool.submit(everyone_runs.wait) for _ in range(number)]
        for future in started:
            future.result()
    finally:
        threading.stack_size(before)
    return pool


def set_native_stack() -> None:
    """Gives threads of the Rust library the same stack; effective before its first thread."""
    os.environ.setdefault("RUST_MIN_STACK", str(_STACK_BYTES))


def _be_nice() -> None:
    # Linux gives each thread a niceness of its own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
