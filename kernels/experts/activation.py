# mypy: disable-error-code="untyped-decorator"
"""The activation between the two products of an expert, as a part of their kernels."""

import triton
import triton.language as tl


@triton.jit
def gate_and_mul(
    gate: tl.tensor, up: tl.tensor, LIMIT: tl.constexpr, ALPHA: tl.constexpr
) -> tl.tensor:
    """Returns silu(gate) * up where LIMIT is 0, else the activation of a `Clamp`; in float32."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y
