"""Linear layers, with weights in the layout that their device multiplies fastest.

On CPU this is oneDNN's blocked layout: with a row-major weight its GEMM takes about twice as long
for the few rows of a decode step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b. Call `pack` once the weight and the bias are filled."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [N, K]
        self.bias = bias  # [N]
        self._is_packed = False

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Linear":
        """A layer with uninitialized memory, to be filled from a checkpoint."""
        return cls(
            torch.empty((out_features, in_features), dtype=dtype, device=device),
            torch.empty(out_features, dtype=dtype, device=device) if bias else None,
        )

    def pack(self) -> None:
        """Converts the weight to the device's layout; the row-major copy is freed if unshared."""
        if _packs(self.weight):
            # Packed for 1 row, since decode speed matters most.
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
            self._is_packed = True

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return product
        return F.linear(x, self.weight, self.bias)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
