"""Slow preparations that need no torch, made while torch is loaded.

Opening a CUDA device and reading Triton mostly wait for the driver and for memory; loading torch is
mostly Python. If something is missing here, its later user raises the error.
"""

import contextlib
import ctypes
import importlib.util
import os
import threading

from worker_svc.config import WorkerConfig
from worker_svc.device.gpu_facts import gpus


def begin(config: WorkerConfig, rank: int = 0) -> None:
    """Starts a thread for the preparations if there is a GPU, and returns at once."""
    if config.device != "cpu" and gpus():
        threading.Thread(target=_run, args=(rank,), name="head-start", daemon=True).start()


def _run(device: int) -> None:
    with contextlib.suppress(OSError):
        open_device(ctypes.CDLL("libcuda.so.1"), device)
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.cache import triton_key  # noqa: PLC0415 - only where Triton is

        triton_key()  # Triton's cache is keyed by a digest of all its files


def open_device(driver: ctypes.CDLL, device: int) -> None:
    """Creates the context that torch will use; a process has one per device."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)
