"""CUDA C compiled at run time, and launches of it with clusters and programmatic dependence.

Needs `cuda.bindings`, which torch's CUDA wheels bring along, and no compiler on the path. Knows
nothing of what the kernels compute.
"""

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LARGEST_PORTABLE_CLUSTER = 8
_MIN_CAPABILITY = (9, 0)  # of a device with clusters and launches that overlap


class CannotCompile(RuntimeError):
    """Raised when this machine cannot compile or load a program; the message says why."""


def can_run_on(device: torch.device) -> bool:
    """True if a device has what programs here use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def num_processors() -> int:
    """Multiprocessors of the current device."""
    device = torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class Launch:
    """The blocks, threads and memory with which a kernel is launched."""

    num_blocks: int  # in all
    cluster: int  # blocks of a cluster
    threads: int  # of a block
    shared_bytes: int = 0  # of a block, in addition to what the kernel declares
    overlaps: bool = True  # may start while the kernel before it runs, and waits for it itself


class Kernel:
    """A loaded kernel with one fixed launch shape."""

    def __init__(self, driver: Any, function: Any, launch: Launch) -> None:
        self._driver = driver
        self._function = function
        attributes = driver.CUfunction_attribute
        shared = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (allowed,) = checked(driver.cuFuncGetAttribute(shared, function))
        if launch.shared_bytes > allowed:  # another launch of the function may need more
            checked(driver.cuFuncSetAttribute(function, shared, launch.shared_bytes))
        if launch.cluster > _LARGEST_PORTABLE_CLUSTER:
            allowed = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            checked(driver.cuFuncSetAttribute(function, allowed, 1))
        self._launch = launch
        self._attributes = self._launch_attributes()

    def most_active_clusters(self) -> int:
        """The number of clusters of this shape that the device runs at once."""
        config = self._config(0, self._attributes[:1])
        (number,) = checked(self._driver.cuOccupancyMaxActiveClusters(self._function, config))
        return int(number)

    def __call__(self, *arguments: "torch.Tensor | int | float | ctypes.Structure") -> None:
        """Launches on torch's stream; whole numbers are 32 bits, floats are single precision."""
        values = [_as_ctypes(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = self._config(torch.cuda.current_stream().cuda_stream, self._attributes)
        address = ctypes.addressof(pointers)
        checked(self._driver.cuLaunchKernelEx(config, self._function, address, 0))

    def _launch_attributes(self) -> list[Any]:
        driver, ids = self._driver, self._driver.CUlaunchAttributeID
        cluster = driver.CUlaunchAttribute()
        cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = self._launch.cluster
        cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
        overlap = driver.CUlaunchAttribute()
        overlap.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        return [cluster, overlap] if self._launch.overlaps else [cluster]

    def _config(self, stream: int, attributes: list[Any]) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._launch.num_blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._launch.threads, 1, 1
        config.sharedMemBytes = self._launch.shared_bytes
        config.hStream = self._driver.CUstream(stream)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A file of CUDA C with the headers of its folder, and how to compile it."""

    path: Path
    options: tuple[str, ...]

    @classmethod
    def of(
        cls, path: Path, defines: Mapping[str, int], capability: tuple[int, int]
    ) -> "CudaSource":
        """With these macros, for devices of this compute capability."""
        major, minor = capability
        suffix = "a" if major >= 9 else ""  # what this architecture alone has
        given = [f"-D{name}={value}" for name, value in defines.items()]
        target = f"--gpu-architecture=sm_{major}{minor}{suffix}"
        return cls(path, (target, "--std=c++17", "-default-device", *given))

    @property
    def headers(self) -> list[Path]:
        """Headers that it may include."""
        return sorted(self.path.parent.glob("*.cuh"))

    def key(self) -> str:
        """A name that differs if anything does that decides what is compiled."""
        parts = [path.read_bytes() for path in (self.path, *self.headers)]
        parts += [option.encode() for option in self.options]
        parts.append(str(torch.version.cuda).encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


class Program:
    """A compiled source on the current device."""

    def __init__(self, path: Path, defines: Mapping[str, int], kept: Path | None = None) -> None:
        """Compiles it, or loads what an earlier start left in the folder `kept`.

        Raises CannotCompile.
        """
        try:
            from cuda.bindings import driver  # noqa: PLC0415 - CUDA machines alone have it
        except ImportError as error:
            raise CannotCompile(f"cuda.bindings: {error}") from error
        torch.cuda.current_stream()  # makes the context
        source = CudaSource.of(path, defines, torch.cuda.get_device_capability())
        self._driver = driver
        (self._module,) = checked(driver.cuModuleLoadData(_image(source, kept)))

    def kernel(self, name: str, launch: Launch) -> Kernel:
        """A kernel of the source. Raises CannotCompile if the device cannot hold its launch."""
        (function,) = checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
        return Kernel(self._driver, function, launch)


def _image(source: CudaSource, kept: Path | None) -> bytes:
    if kept is None:
        return _compiled(source)
    path = kept / f"{source.path.stem}-{source.key()}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    image = _compiled(source)
    # Several ranks may start at once: each writes a file of its own, and one rename is the last.
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(image)
        own.replace(path)
    return image


def _compiled(source: CudaSource) -> bytes:
    from cuda.bindings import nvrtc  # noqa: PLC0415 - CUDA machines alone have it

    texts = [each.read_bytes() for each in source.headers]
    names = [each.name.encode() for each in source.headers]
    created = nvrtc.nvrtcCreateProgram(
        source.path.read_bytes(), source.path.name.encode(), len(texts), texts, names
    )
    (program,) = checked(created)
    options = [option.encode() for option in source.options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = checked(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise CannotCompile(f"{source.path.name}: {log.decode(errors='replace')}")
    (size,) = checked(nvrtc.nvrtcGetCUBINSize(program))
    image: bytes = b" " * size
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The value of a call of the driver or compiler. Raises CannotCompile with its error."""
    error, *rest = answer
    if int(error) != 0:
        raise CannotCompile(str(error))
    return tuple(rest)


def _as_ctypes(argument: "torch.Tensor | int | float | ctypes.Structure") -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return argument
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int(argument)
