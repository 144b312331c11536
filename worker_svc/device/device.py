"""Which device, which floating-point type, how many threads; whether the device still answers."""

from collections.abc import Callable

import torch

from worker_svc.process.exit_codes import Ending, end_process

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """auto, cpu or cuda; auto is cuda where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: {name!r} is none of auto, cpu, cuda")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("device: cuda was asked for and torch finds no CUDA device")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def resolve_dtype(
    name: str,
    device: torch.device,
    checkpoint_dtype: str,
    measure: Callable[[], torch.dtype] | None = None,
) -> torch.dtype:
    """auto, float32, bfloat16 or float16.

    auto on CPU is what `measure` finds quickest; without it, which is for ranks that must agree,
    bfloat16 where the CPU multiplies it in hardware, else float32. On CUDA it is the checkpoint's
    type, and bfloat16 for float32 checkpoints.
    """
    if name != "auto":
        return _named_dtype("dtype", name)
    if device.type == "cpu":
        if measure is not None:
            return measure()
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    dtype = _named_dtype("dtype of the checkpoint", checkpoint_dtype)
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _named_dtype(what: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{what}: {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def set_num_threads(count: int, num_ranks: int = 1) -> int:
    """Threads of one CPU operation; 0: this rank's share of the cores. Returns the number."""
    if count < 0:
        raise ValueError(f"threads: {count} is negative")
    if count == 0 and num_ranks > 1:
        count = max(1, torch.get_num_threads() // num_ranks)
    if count > 0:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def end_if_lost(device: torch.device, error: Exception) -> None:
    """Call it on an error of the device: ends the process if all later calls would fail.

    After an illegal address or a failed assertion every call fails until the process ends. Being
    out of memory, or a refused launch, has no lasting effect.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        end_process(Ending.DEVICE_LOST, f"{device} is lost: {type(error).__name__}: {error}")
