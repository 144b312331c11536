# mypy: disable-error-code="no-untyped-call"
"""Runs Triton's compiler without a device: launches are recorded and compiled, but not run.

Tensors on the meta device suffice, since a specialization depends on the types and alignment of its
arguments and on constants, not on values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver
from triton.runtime.cache import triton_key

WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Specialization:
    """One kernel, specialized for argument types and constants."""

    kernel: Any  # triton's JITFunction
    description: str  # Triton's description, as JSON

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self) -> Any:
        """Compiles the kernel into Triton's cache on disk and returns it."""
        return self.kernel.preload(self.description)


def note_launches(arch: int, on_new: Callable[[Specialization], None]) -> None:
    """Makes later launches in this process call `on_new` for each new specialization and not run.

    `arch` is the compute capability, major * 10 + minor.
    """
    seen: set[tuple[str, str]] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if compile["is_warmup"]:  # called by Specialization.compile
            return False
        found = Specialization(fn.jit_function, compile["specialization_data"])
        if (found.name, found.description) not in seen:
            seen.add((found.name, found.description))
            # Up to Triton 3.6 a kernel's key depends on which of the functions that it calls have
            # keys already. So keys are made here, in the order of launches, as in the worker; in
            # forks of this process each kernel would be the first.
            _ = found.kernel.cache_key
            on_new(found)
        return True  # skips compiling and running

    driver.set_active(_CompileOnly(arch))
    knobs.runtime.jit_cache_hook = note
    triton_key()  # digest of Triton's files, inherited by forks


def build_driver() -> None:
    """Compiles Triton's driver module into its cache. Needs the driver's library."""
    CudaUtils()


def build_launcher(compiled: Any) -> None:
    """Compiles a kernel's launcher into Triton's cache. Needs the driver's library.

    Up to Triton 3.6 the launcher is C code, compiled per signature with the system's compiler.
    """
    CudaLauncher(compiled.src, compiled.metadata)


class _CompileOnly(DriverBase):  # type: ignore[misc]
    """A driver that answers the compiler's questions about the target and cannot launch."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP_SIZE)

    @classmethod
    def is_active(cls) -> bool:
        return True

    @property
    def utils(self) -> CudaUtils:
        return CudaUtils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError(f"nothing is launched, so {ty} needs no C++")

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError("nothing is launched, so nothing can be timed")
