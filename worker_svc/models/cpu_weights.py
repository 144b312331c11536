"""Weights in the layouts of torch's CPU libraries: oneDNN's blocks, and FBGEMM's float16 panels.

Knows neither layers nor checkpoints. A type that the CPU does not multiply in hardware is stored as
float16 and widened in registers: half of float32's bytes, float32's arithmetic.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_svc.device.device import cpu_multiplies

ENGINES = ("fbgemm", "x86")  # torch's names of what FBGEMM is part of
NARROW = (torch.bfloat16, torch.float16)
# Rounding to float16 may add as much to a row of a weight as rounding to bfloat16 added, at most.
MAX_ROUNDING = 2.0**-9
ROWS_AT_ONCE = 4096  # that are compared; a copy of a whole head would be large

# Inputs [T, K], perhaps of another type than the weight -> [T, N] of the inputs' type.
Multiply = Callable[[Tensor], Tensor]


def activation_dtype(weight_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type between layers: the weights', or float32 where they are widened."""
    return torch.float32 if _widens(weight_dtype, device) else weight_dtype


def pack(weight: Tensor, bias: Tensor | None) -> Multiply | None:
    """The product with weight [N, K] and bias [N] in a quicker layout; None: none is known."""
    if _widens(weight.dtype, weight.device):
        return _widening(weight.float(), None if bias is None else bias.float())
    if weight.device.type == "cpu" and _onednn_packs(weight.dtype):
        return _onednn(weight, bias)
    return None


def _widens(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or dtype not in NARROW or not _has_fbgemm():
        return False
    return not (_onednn_packs(dtype) and cpu_multiplies(dtype))


def _has_fbgemm() -> bool:
    """True if FBGEMM is here and the CPU has what its float16 kernels are made of."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx2") and has.get("f16c") and torch.backends.quantized.engine in ENGINES)


def _onednn_packs(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _onednn(weight: Tensor, bias: Tensor | None) -> Multiply:
    # 1 is the expected number of rows: decoding must be fast.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    multiply = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        y: Tensor = multiply(x, packed, bias, "none", [], "")
        return y

    return product


def _widening(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product in float32 with a weight that is given in float32."""
    if not _fits_float16(weight):
        wide = _onednn(weight, bias) if _onednn_packs(torch.float32) else _plain(weight, bias)
        return lambda x: wide(x.float()).to(x.dtype)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16

    def product(x: Tensor) -> Tensor:
        y: Tensor = multiply(x.float(), packed)
        return y.to(x.dtype)

    return product


def _plain(weight: Tensor, bias: Tensor | None) -> Multiply:
    return lambda x: F.linear(x, weight, bias)


def _fits_float16(weight: Tensor) -> bool:
    """True if every row [K] is as good in float16 as it was in bfloat16; not if a value is inf."""
    for rows in torch.split(weight, ROWS_AT_ONCE):
        error = torch.linalg.vector_norm(rows.half().float().sub_(rows), dim=1)
        if not bool((error <= MAX_ROUNDING * torch.linalg.vector_norm(rows, dim=1)).all()):
            return False
    return True
