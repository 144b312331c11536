"""Programmatic dependent launch: a kernel may start while the one before it still runs.

Every kernel here keeps two rules, and that is all its neighbours have to know. It touches nothing
but weights before `gdc_wait`, and every one of its programs reaches `gdc_wait`; so the end of a
kernel means the end of all kernels before it. It calls `gdc_launch_dependents` early, which only
lets the next kernel take free room and read its weights. Weights are therefore never to be written
by a kernel that one of these follows without a synchronization between them.
"""

from functools import lru_cache

import torch
import triton


@lru_cache
def _device_has_pdl(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def _target_has_pdl() -> bool:
    return int(triton.runtime.driver.active.get_current_target().arch) >= 90


def has_pdl(x: torch.Tensor) -> bool:
    """Whether kernels on the device of `x` can overlap this way."""
    if x.is_cuda:
        return _device_has_pdl(x.get_device())
    return x.is_meta and _target_has_pdl()  # compiled for a device and not run


def is_compiled(x: torch.Tensor) -> bool:
    """Whether Triton compiles what is launched with `x`, or else interprets it."""
    return x.is_cuda or x.is_meta


def launch_options(x: torch.Tensor) -> dict[str, bool]:
    """Triton's launch option; empty where it means nothing, since the interpreter refuses it."""
    return {"launch_pdl": True} if has_pdl(x) else {}
