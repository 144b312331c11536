"""Linear layers with the model's weights, each in the layout that its device multiplies fastest.

On CPU that is oneDNN's own blocked layout: for the few rows of a decode step, its GEMM with a plain
row-major weight takes about twice as long.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b. Once the weight and the bias are filled, call `pack`."""

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
        """Uninitialized memory, to be filled from a checkpoint."""
        return cls(
            torch.empty((out_features, in_features), dtype=dtype, device=device),
            torch.empty(out_features, dtype=dtype, device=device) if bias else None,
        )

    def pack(self) -> None:
        """Moves the weight to the device's layout; the plain copy is freed with its last owner."""
        if _packs(self.weight):
            # 1 is the expected number of rows: decoding must be fast.
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
