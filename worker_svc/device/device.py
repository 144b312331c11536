"""Selects the device, the dtype and the number of threads; checks for a lost device."""

from collections.abc import Callable

import torch

from kernels import fp8
from worker_svc.config import UnsupportedOption
from worker_svc.process.exit_codes import ExitCode, end_process

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,  # as elsewhere, the type with more digits
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def resolve_device(name: str) -> torch.device:
    """Resolves auto, cpu or cuda; auto is cuda if a CUDA device exists. Raises ValueError."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: {name!r} is none of auto, cpu, cuda")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UnsupportedOption("device: cuda is not available, torch finds no CUDA device")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def resolve_dtype(
    name: str,
    device: torch.device,
    checkpoint_dtype: str,
    measure: Callable[[], torch.dtype] | None = None,
) -> torch.dtype:
    """Resolves auto, float32, bfloat16 or float16. Raises ValueError for other names.

    auto on CPU is the result of `measure`; if it is None, because ranks must agree, bfloat16 if the
    CPU has bfloat16 GEMM instructions, else float32. auto on CUDA is the checkpoint's dtype, with
    bfloat16 in place of float32.
    """
    if name != "auto":
        return _named_dtype("dtype", name)
    if device.type == "cpu":
        if measure is not None:
            return measure()
        return torch.bfloat16 if cpu_multiplies(torch.bfloat16) else torch.float32
    dtype = _named_dtype("dtype of the checkpoint", checkpoint_dtype)
    return torch.bfloat16 if dtype == torch.float32 else dtype


def resolve_kv_dtype(
    name: str, dtype: torch.dtype, device: torch.device | None = None
) -> torch.dtype:
    """The KV cache's type; auto is the model's. Raises UnsupportedOption for an older device."""
    kv_dtype = dtype if name == "auto" else KV_DTYPES[name]
    if device is not None and device.type == "cuda" and fp8.is_fp8(kv_dtype):
        least, found = fp8.MIN_CAPABILITY[kv_dtype], torch.cuda.get_device_capability(device)
        if found < least:
            raise UnsupportedOption(
                f"kv_cache_dtype: {name} needs compute capability {least[0]}.{least[1]}, the "
                f"device has {found[0]}.{found[1]}"
            )
    return kv_dtype


def kv_dtype_name(kv_dtype: torch.dtype) -> str:
    """Its name in descriptions: that of the option for FP8, else torch's."""
    names = {dtype: name for name, dtype in KV_DTYPES.items()}
    return names.get(kv_dtype, str(kv_dtype).removeprefix("torch."))


def _named_dtype(what: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{what}: {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """True if the CPU has instructions that multiply this narrow type."""
    has = torch.cpu.get_capabilities()
    if dtype == torch.bfloat16:
        return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
    return bool(has.get("avx512_fp16") or has.get("amx_fp16"))


def set_num_threads(count: int, num_ranks: int = 1) -> int:
    """Sets the threads per CPU operation and returns them; 0: this rank's share of the cores."""
    if count < 0:
        raise ValueError(f"threads: {count} is negative")
    if count == 0 and num_ranks > 1:
        count = max(1, torch.get_num_threads() // num_ranks)
    if count > 0:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def end_if_lost(device: torch.device, error: Exception) -> None:
    """Ends the process if the error has made all later calls of the device fail.

    After an illegal address or a failed assertion every call fails until the process ends. An
    out-of-memory error or a refused launch has no lasting effect.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        end_process(ExitCode.DEVICE_LOST, f"{device} is lost: {type(error).__name__}: {error}")
