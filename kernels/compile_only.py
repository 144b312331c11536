# mypy: disable-error-code="no-untyped-call"
"""Triton's compiler on its own: what is launched is noted and compiled, and nothing runs.

For a process that has no device or leaves it alone. Tensors of the device `meta` are enough, since
a kernel depends on the types and shapes of its arguments and on no value.
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
    """One kernel for one set of argument types and constants."""

    kernel: Any  # triton's JITFunction
    description: str  # triton's own, as JSON

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self) -> Any:
        """Leaves the machine code in Triton's cache on disk, and returns it."""
        return self.kernel.preload(self.description)


def note_launches(arch: int, on_new: Callable[[Specialization], None]) -> None:
    """From here on, a launch in this process calls `on_new` if it needs another specialization.

    `arch` is the compute capability, major * 10 + minor.
    """
    seen: set[tuple[str, str]] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if compile["is_warmup"]:  # it comes from Specialization.compile
            return False
        found = Specialization(fn.jit_function, compile["specialization_data"])
        if (found.name, found.description) not in seen:
            seen.add((found.name, found.description))
            on_new(found)
        return True  # that is all: neither compile nor run

    driver.set_active(_CompileOnly(arch))
    knobs.runtime.jit_cache_hook = note
    triton_key()  # reads all of Triton, once: forks of this process need not


def build_driver() -> None:
    """Leaves what Triton calls the driver with in its cache. Needs the driver's library."""
    CudaUtils()


def build_launcher(compiled: Any) -> None:
    """Leaves what a compiled kernel is called with in Triton's cache. Needs the driver's library.

    It is C, which Triton up to 3.6 has the system's compiler translate for each signature.
    """
    CudaLauncher(compiled.src, compiled.metadata)


class _CompileOnly(DriverBase):  # type: ignore[misc]
    """What Triton asks of a device before it compiles."""

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
