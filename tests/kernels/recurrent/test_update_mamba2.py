"""The scan of Mamba-2 with states in rows, against the scan written out token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.mamba2 import update_mamba2
from kernels.recurrent.segments import Segments
from kernels.recurrent.selective_scan import HeadParameters, ScanHeads
from tests.kernels.recurrent.in_rows import FLOAT32, LENGTHS, InRows, close_by

SIZES = (4, 24, 2, 20)  # heads and their dimension, groups and the size of their states


class Case:
    """Random channels and steps of a step's tokens."""

    def __init__(
        self,
        num_tokens: int,
        sizes: tuple[int, int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        num, dim, groups, size = sizes
        width = num * dim + 2 * groups * size
        # Rows that lie apart, as those of a projection with gates do.
        self.channels = torch.randn(num_tokens, width + 8, device=device).to(dtype)[:, :width]
        self.steps = torch.randn(num_tokens, num + 5, device=device).to(dtype)[:, :num]
        numbers = torch.rand(3, num, device=device)
        parameters = HeadParameters(-numbers[0] - 0.1, numbers[1] - 0.5)
        self.heads = ScanHeads(*sizes, parameters, numbers[2])
        self.shape = num, dim, size

    def update(self, states: Tensor, waves: list[Segments]) -> Tensor:
        return update_mamba2(self.channels, self.steps, self.heads, states, waves)

    def written_out(self, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs in float64, and the state [H, P, N]."""
        heads, parameters = self.heads, self.heads.parameters
        of_groups = heads.num_groups * heads.state_size
        inner = heads.num_heads * heads.head_dim
        x, b, c = torch.split(self.channels[tokens].double(), [inner, of_groups, of_groups], -1)
        share = heads.num_heads // heads.num_groups
        b, c = (
            each.view(len(x), heads.num_groups, -1).repeat_interleave(share, 1) for each in (b, c)
        )
        x = x.view(len(x), heads.num_heads, -1)
        steps = F.softplus(self.steps[tokens].double() + heads.step_bias, threshold=700)
        out = []
        for i in range(len(x)):
            kept = torch.exp(parameters.decay.double() * steps[i])
            state = kept[:, None, None] * state
            state = state + (steps[i][:, None] * x[i])[:, :, None] * b[i][:, None, :]
            y = torch.einsum("hpn,hn->hp", state, c[i])
            out.append((y + parameters.skip[:, None] * x[i]).flatten())
        return torch.stack(out), state


@pytest.mark.parametrize(
    ("sizes", "dtype", "bound"),
    [
        (SIZES, torch.float32, FLOAT32),
        ((2, 80, 1, 16), torch.float32, FLOAT32),
        ((2, 16, 1, 24), torch.bfloat16, 4e-3),  # outputs are rounded
        ((2, 64, 1, 128), torch.bfloat16, 4e-3),  # as released models have them
    ],
)
def test_prompts_and_single_tokens_in_one_launch(sizes, dtype, bound, device):
    case = Case(sum(LENGTHS), sizes, device, dtype)
    InRows.of(LENGTHS, case.shape, device).check(case.update, case.written_out, close_by(bound))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SIZES, (2, 64, 1, 128), (3, 8, 3, 12)])
def test_sequences_of_one_token_each(sizes, dtype, device, assert_close):
    case = Case(5, sizes, device, dtype)
    InRows.of([1] * 5, case.shape, device).check(case.update, case.written_out, assert_close)


def test_a_sequence_cut_anywhere_is_the_whole_one(device):
    lengths = [70, 1, 3]
    case = Case(sum(lengths), SIZES, device)
    InRows.of(lengths, case.shape, device).check_cuts(case.update)


@pytest.mark.parametrize("lengths", [[1, 1], [66, 2]])
def test_heads_that_forget_at_once_or_never_are_no_less_exact(lengths, device):
    case = Case(sum(lengths), SIZES, device)
    case.heads.parameters.decay[:2] = torch.tensor([-80.0, -1e-4], device=device)
    case.steps[::3, 2] = 40.0  # next to exact where a softplus is
    case.steps[1::4, :2] = -90.0  # no step: nothing is forgotten, and nothing written
    rows = InRows.of(lengths, case.shape, device)
    rows.check(case.update, case.written_out, close_by(FLOAT32))
