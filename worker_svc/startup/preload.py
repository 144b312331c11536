"""Initializes CUDA and Triton in a thread while torch is being imported.

Opening a CUDA device and hashing Triton's files mostly wait for the driver and for memory;
importing torch is mostly Python. Errors are ignored here: torch or Triton raises them again when
used.
"""

import contextlib
import ctypes
import importlib.util
import os
import threading

from worker_svc.config import WorkerConfig
from worker_svc.device.gpu_facts import gpus


def begin(config: WorkerConfig, rank: int = 0) -> None:
    """Starts the thread if there is a GPU, and returns at once."""
    if config.device != "cpu" and gpus():
        threading.Thread(target=_run, args=(rank,), name="head-start", daemon=True).start()


def _run(device: int) -> None:
    with contextlib.suppress(OSError):
        open_device(ctypes.CDLL("libcuda.so.1"), device)
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.cache import triton_key  # noqa: PLC0415 - Triton may be missing

        triton_key()  # cached digest of Triton's files


def open_device(driver: ctypes.CDLL, device: int) -> None:
    """Retains the primary context, the one that torch will use."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch's default
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)
