"""MXFP4, the form of gpt-oss's experts: 32 numbers of 4 bits share a power of two.

Layers other than experts are plain numbers. It knows the settings and the tensors; where experts
lie in a checkpoint it does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.quantization import keys
from worker_svc.quantization.keys import WHERE
from worker_svc.quantization.scheme import PLAIN, DamagedWeight, Scheme

READ = {"quant_method", "method", "modules_to_not_convert"}
BLOCK = 32  # numbers that share a scale
_BIAS, _NAN = 127, 255  # of a scale, which is an exponent
# By code: the sign is the highest bit.
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Settings of a checkpoint whose experts are in MXFP4."""

    label: str = "mxfp4"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Mxfp4":
        """Reads `quantization_config`. Raises UnsupportedQuantization."""
        keys.check_keys(WHERE, given, READ)
        keys.names(WHERE, given, "modules_to_not_convert")  # what is stored says the same
        return cls()

    def scheme(self, name: str) -> Scheme:
        """The scheme of plain numbers: no linear layer of its own is in MXFP4."""
        return PLAIN


def widened(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [N, K / 32, 16] and exponents [N, K / 32], uint8 both -> numbers [N, K].

    The lower half of a byte is the first of its two numbers. Raises DamagedWeight for a scale that
    is no number.
    """
    check(scales)
    table = torch.tensor(_NUMBERS, dtype=torch.float32, device=blocks.device)
    numbers = torch.cat((table, -table))
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [N, K / 32, 32]
    exponents = scales.int().unsqueeze(-1) - _BIAS
    return torch.ldexp(numbers[codes.int()], exponents).flatten(1).to(dtype)


def rearranged(blocks: Tensor, scales: Tensor) -> Tensor:
    """The codes as kernels read them, [N, K / 2]: see `ExpertWeights`. Raises as `widened`."""
    check(scales)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [N, K / 32, 32]
    first, second = codes.chunk(2, -1)
    return (first | second << 4).flatten(1)


def separated(codes: Tensor) -> Tensor:
    """The codes [N, K], a byte each and in the order of columns, of those of `rearranged`."""
    blocks = codes.view(len(codes), -1, BLOCK // 2)
    return torch.cat((blocks & 15, blocks >> 4), -1).flatten(1)


def check(scales: Tensor) -> None:
    """Raises DamagedWeight for a scale that is no number."""
    if bool((scales == _NAN).any()):
        raise DamagedWeight("scales: hold NaN")
