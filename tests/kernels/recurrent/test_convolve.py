"""The short convolution with states in rows, against the convolution of each sequence alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.convolution import causal_conv
from kernels.recurrent.convolve import convolve
from kernels.recurrent.segments import Segments
from tests.kernels.recurrent.in_rows import LENGTHS, InRows, close_by


class Case:
    """Random inputs of a step's tokens, and filters."""

    def __init__(
        self,
        num_tokens: int,
        channels: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        gated: bool = False,
    ) -> None:
        self._gated, size = gated, channels * (3 if gated else 1)
        # Rows that lie apart, as those of a projection with gates do.
        self._x = torch.randn(num_tokens, size + 8, device=device).to(dtype)[:, :size]
        self._weight = torch.randn(channels, width, device=device).to(dtype)
        self._bias = None if gated else torch.randn(channels, device=device).to(dtype)
        self.shape = channels, width - 1

    def update(self, states: Tensor, waves: list[Segments]) -> Tensor:
        return convolve(self._x, self._weight, self._bias, states, waves, gated=self._gated)

    def alone(self, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """The sums in float64, but for what states hold of products."""
        x, bias = self._x[tokens], None if self._bias is None else self._bias.double()
        if self._gated:
            b, c, x = x.chunk(3, -1)
            x = b * x
        y, state = causal_conv(x.double()[None], state[None], self._weight.double(), bias)
        return (c.double() * y[0] if self._gated else F.silu(y[0])), state[0]


@pytest.mark.parametrize(
    ("dtype", "bound", "width", "gated"),
    [
        (torch.float32, 1e-6, 4, False),
        (torch.float32, 1e-6, 3, True),
        (torch.bfloat16, 8e-3, 3, False),
        (torch.bfloat16, 8e-3, 4, True),
    ],
)
def test_prompts_and_single_tokens_in_one_launch(dtype, bound, width, gated, device):
    case = Case(sum(LENGTHS), 150, width, device, dtype, gated=gated)
    InRows.of(LENGTHS, case.shape, device).check(case.update, case.alone, close_by(bound))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_sequences_of_one_token_each(width, gated, device):
    case = Case(5, 300, width, device, gated=gated)
    InRows.of([1] * 5, case.shape, device).check(case.update, case.alone, close_by(1e-6))


@pytest.mark.parametrize("gated", [False, True])
def test_a_sequence_cut_anywhere_is_the_whole_one(gated, device):
    lengths = [70, 1, 3]
    case = Case(sum(lengths), 20, 4, device, gated=gated)
    InRows.of(lengths, case.shape, device).check_cuts(case.update)
