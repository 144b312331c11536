"""Returns freed memory to the system, where the C library can."""

import ctypes
from collections.abc import Callable
from functools import cache


def return_memory() -> None:
    """Gives back what is free in all of the allocator's arenas; some ten milliseconds.

    A tokenizer takes a hundred bytes and more per byte of its text. Freed, they would stay with the
    arena of the thread that took them.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    """The C library's `malloc_trim`, which only glibc has; it runs without the interpreter."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return _nothing
    return trim


def _nothing(_: int) -> int:
    return 0
