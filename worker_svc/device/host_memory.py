"""Large memory of the host that a GPU copies from and to while the host goes on."""

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

MOST_THREADS = 16


def pinned_bytes(num_bytes: int) -> Tensor:
    """Zeros that are pinned, uint8 [num_bytes].

    torch's own pinned memory is of the next power of two, and is filled by one thread: 9 GiB took
    16 GiB and 8.6 s on a host with 16 cores, and take 9 GiB and 0.5 s so. Raises RuntimeError if
    the driver refuses.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    # A fork would copy pinned pages at once, all of them.
    pages.madvise(mmap.MADV_DONTFORK)
    found = torch.frombuffer(pages, dtype=torch.uint8)
    num_threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as threads:
        # Written once, pages exist; the driver would make them one after the other.
        list(threads.map(Tensor.zero_, found.chunk(num_threads)))
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(found.data_ptr(), num_bytes, 0)))
    # Called before the pages are given back, which is when no tensor uses them.
    weakref.finalize(pages, runtime.cudaHostUnregister, found.data_ptr()).atexit = False
    return found
