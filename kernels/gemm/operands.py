"""Checks the operands of the linear kernels; errors name the operand."""

import torch


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    gated: bool,
    residual: torch.Tensor | None,
    max_rows: int,
    **others: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Returns (M, N, K) for x [M, K] and weight [N, K]; a gated layer's N is half the weight's.

    `others` need only have x's dtype. Raises ValueError or TypeError.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if not 0 < m <= max_rows:
        raise ValueError(f"{m} rows; this kernel is for 1 to {max_rows}")
    if weight.shape[1] != k or not weight.is_contiguous() or weight.shape[0] % (1 + gated):
        raise ValueError(f"weight must be contiguous [N, {k}], got {tuple(weight.shape)}")
    if x.stride(1) != 1:
        raise ValueError("rows of x must be contiguous")
    if residual is not None and (residual.shape != (m, n) or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous [{m}, {n}]")
    for name, other in {**others, "residual": residual, "weight": weight}.items():
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype}, {name} is {other.dtype}")
    return m, n, k
