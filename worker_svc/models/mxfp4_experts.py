"""Experts of a checkpoint in MXFP4: their codes and scales, which may become float numbers.

Codes and scales are two tensors, which may lie in two files: the first waits for the second.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker_svc.models.stored.weight_files import WeightError
from worker_svc.quantization.mxfp4 import BLOCK, rearranged, widened
from worker_svc.quantization.scheme import DamagedWeight

BLOCKS, SCALES = "blocks", "scales"


class DamagedExperts(WeightError):
    """Tensors of experts in MXFP4 have a type or values that they cannot have."""


@dataclass(slots=True)
class Mxfp4Experts:
    """The weights of all experts, to be filled from two tensors of the name's endings."""

    name: str
    values: Tensor  # [E, N, K]; of codes that stay [E, N, K / 2]
    scales: Tensor | None  # [E, N, K / 32]; None: the codes become float numbers
    num_parts: int  # the outputs of so many matrices alternate in the checkpoint
    _found: dict[str, Tensor] = field(default_factory=dict)

    def put(self, ending: str, tensor: Tensor) -> None:
        """Takes one of the tensors; fills the weights with the second. Raises DamagedExperts."""
        if tensor.dtype != torch.uint8:
            raise DamagedExperts(f"{self.name}_{ending}: is of {tensor.dtype}, not torch.uint8")
        self._found[ending] = tensor
        if len(self._found) == 2:
            self._fill(self._found[BLOCKS], self._found[SCALES])
            self._found.clear()

    def _fill(self, blocks: Tensor, scales: Tensor) -> None:
        for index in range(len(blocks)):
            try:
                self._fill_one(index, blocks[index], scales[index])
            except DamagedWeight as error:
                raise DamagedExperts(f"{self.name}_{error}") from None

    def _fill_one(self, index: int, codes: Tensor, exponents: Tensor) -> None:
        device = self.values.device
        codes, exponents = codes.to(device), exponents.to(device)
        if self.scales is None:
            self._copy(widened(codes, exponents, self.values.dtype), self.values[index])
        else:
            self._copy(rearranged(codes, exponents), self.values[index])
            self._copy(exponents, self.scales[index])

    def _copy(self, outputs: Tensor, to: Tensor) -> None:
        """Fills the outputs of one matrix after the other with alternating ones."""
        width = to.shape[1]
        in_turn = outputs.view(-1, self.num_parts, width).transpose(0, 1)
        to.view(self.num_parts, -1, width).copy_(in_turn)


@dataclass(frozen=True, slots=True)
class CodeRows:
    """A destination: outputs of one expert, which stay codes in MXFP4."""

    codes: Tensor  # [N, K / 2], as `ExpertWeights` has them
    exponents: Tensor  # [N, K / 32]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, K)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def copy_(self, values: Tensor) -> None:
        """Raises TypeError: numbers do not become codes."""
        raise TypeError(f"a weight {list(self.shape)}: codes of MXFP4 are not made of numbers")

    def put_codes(self, codes: Tensor, exponents: Tensor) -> None:
        """Fills them, in this layout, from any device."""
        self.codes.copy_(codes)
        self.exponents.copy_(exponents)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A destination: codes or scales of all experts."""

    experts: Mxfp4Experts
    ending: str  # BLOCKS or SCALES

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        num_experts, num_outputs, width = self.experts.values.shape
        num_inputs = width if self.experts.scales is None else 2 * width
        by_block = num_experts, num_outputs, num_inputs // BLOCK
        return (*by_block, BLOCK // 2) if self.ending == BLOCKS else by_block

    def copy_(self, values: Tensor) -> None:
        """Takes the tensor. Raises DamagedExperts."""
        self.experts.put(self.ending, values)
