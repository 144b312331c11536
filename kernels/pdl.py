"""Programmatic dependent launch: a kernel may start while the previous one still runs.

Every kernel here keeps two rules. It accesses only weights before `gdc_wait`, and all its programs
reach `gdc_wait`; so the end of a kernel implies the end of all kernels before it. It calls
`gdc_launch_dependents` early, which lets the next kernel take free multiprocessors and read its
weights. Therefore a kernel that writes weights must be synchronized with the kernels after it.
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
    """True if kernels on the device of `x` can overlap this way."""
    if x.is_cuda:
        return _device_has_pdl(x.get_device())
    return x.is_meta and _target_has_pdl()  # compiled but not run


def is_compiled(x: torch.Tensor) -> bool:
    """True if Triton compiles kernels launched with `x`; if not, it interprets them."""
    return x.is_cuda or x.is_meta


def launch_options(x: torch.Tensor) -> dict[str, bool]:
    """Triton's launch option for PDL; empty where the interpreter would refuse it."""
    return {"launch_pdl": True} if has_pdl(x) else {}
