"""Programmatic dependent launch: a kernel may start while the one before it still runs.

Every kernel here keeps two rules, and that is all its neighbours have to know. It touches nothing
but weights before `gdc_wait`, and every one of its programs reaches `gdc_wait`; so the end of a
kernel means the end of all kernels before it. It calls `gdc_launch_dependents` early, which only
lets the next kernel take free room and read its weights. Weights are therefore never to be written
by a kernel that one of these follows without a synchronization between them.
"""

from functools import lru_cache

import torch


@lru_cache
def _device_has_pdl(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def has_pdl(x: torch.Tensor) -> bool:
    """Whether kernels on the device of `x` can overlap this way."""
    return x.is_cuda and _device_has_pdl(x.get_device())


def launch_options(x: torch.Tensor) -> dict[str, bool]:
    """Triton's launch option; empty where it means nothing, since the interpreter refuses it."""
    return {"launch_pdl": True} if has_pdl(x) else {}
