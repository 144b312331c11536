"""Linear layers, with weights in the layout that their device multiplies fastest."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_svc.models.cpu_weights import Multiply, pack


class Linear:
    """y = x W^T + b. Call `pack` once the weight and the bias are filled."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [N, K]
        self.bias = bias  # [N]
        self._packed: Multiply | None = None

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
        """Moves the weight to the device's layout; the plain copy is freed with its last owner."""
        self._packed = pack(self.weight, self.bias)
        if self._packed is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)
