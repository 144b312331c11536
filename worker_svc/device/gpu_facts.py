"""Reads the machine's GPUs and the driver version with NVML.

Needs neither torch nor a CUDA context, and takes milliseconds.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

_NAME_BYTES, _VERSION_BYTES = 96, 80


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU that determine its kernels."""

    name: str
    arch: int  # compute capability, major * 10 + minor


@cache
def gpus() -> tuple[Gpu, ...]:
    """All GPUs, in NVML's order; empty without a driver."""
    with _library() as library:
        count = ctypes.c_uint()
        if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        found = [_gpu(library, index) for index in range(count.value)]
    return tuple(gpu for gpu in found if gpu is not None)


@cache
def driver_version() -> str:
    """The driver version, such as 580.95.05; empty without a driver."""
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    with _library() as library:
        if library is None or library.nvmlSystemGetDriverVersion(version, _VERSION_BYTES):
            return ""
    return version.value.decode()


@contextmanager
def _library() -> Iterator[ctypes.CDLL | None]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2():
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def only_kind(found: Sequence[Gpu]) -> Gpu | None:
    """The GPU that all of these equal; None if there are none, or they differ."""
    kinds = set(found)
    return kinds.pop() if len(kinds) == 1 else None


def _gpu(library: ctypes.CDLL, index: int) -> Gpu | None:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if (
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or library.nvmlDeviceGetName(handle, name, _NAME_BYTES)
        or library.nvmlDeviceGetCudaComputeCapability(
            handle, ctypes.byref(major), ctypes.byref(minor)
        )
    ):
        return None
    return Gpu(name.value.decode(), major.value * 10 + minor.value)
