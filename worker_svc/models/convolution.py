"""The short convolution of a recurrent layer: each channel over a token and those before it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.recurrent.convolution import causal_conv
from kernels.recurrent.segments import Segments
from worker_svc.models.layers import Destinations


class Convolution:
    """Weights of a convolution, a filter for each channel."""

    def __init__(
        self, channels: int, width: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weight = torch.empty((channels, 1, width), dtype=dtype, device=device)
        self._bias = torch.empty(channels, dtype=dtype, device=device) if bias else None

    def destinations(self, prefix: str) -> Destinations:
        yield f"{prefix}.weight", self._weight
        if self._bias is not None:
            yield f"{prefix}.bias", self._bias

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        self._weight = self._weight.to(dtype)
        if self._bias is not None:
            self._bias = self._bias.to(dtype)

    def __call__(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [B, N, C] of inputs [B, N, C], and the state after them: see `causal_conv`."""
        return causal_conv(x, state, self._weight[:, 0], self._bias)

    def in_place(
        self, x: Tensor, states: Tensor, waves: Sequence[Segments], *, gated: bool = False
    ) -> Tensor:
        """silu of the sums of a step's inputs [T, C], with states in rows; see `convolve`."""
        from kernels.recurrent.convolve import convolve  # noqa: PLC0415 - needs Triton

        return convolve(x, self._weight[:, 0], self._bias, states, waves, gated=gated)
