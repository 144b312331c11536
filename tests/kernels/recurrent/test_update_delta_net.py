"""The gated delta rule with states in rows, against the rule written out token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.delta_net import update_delta_net
from kernels.recurrent.delta_rule import EPS, DeltaHeads
from kernels.recurrent.segments import Segments
from tests.kernels.recurrent.in_rows import BFLOAT16, FLOAT16, FLOAT32, LENGTHS, InRows, close_by


class Case:
    """Random channels and steps of a step's tokens."""

    def __init__(
        self,
        num_tokens: int,
        sizes: tuple[int, int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`sizes` are the heads of keys and of values, and their dimensions."""
        keys, values, dk, dv = sizes
        width = 2 * keys * dk + values * dv
        # Rows that lie apart, as those of a projection with gates do.
        self.channels = torch.randn(num_tokens, width + 8, device=device).to(dtype)[:, :width]
        self.steps = torch.randn(num_tokens, 2 * values, device=device).to(dtype)
        rates, bias = -torch.rand(values, device=device), torch.randn(values, device=device)
        self.heads = DeltaHeads(*sizes, rates, bias)
        self.shape = values, dk, dv

    def update(self, states: Tensor, waves: list[Segments]) -> Tensor:
        return update_delta_net(self.channels, self.steps, self.heads, states, waves)

    def written_out(self, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs in float64, and the state [V, dk, dv]."""
        heads, keys = self.heads, self.heads.num_keys * self.heads.key_dim
        channels = self.channels[tokens].double()
        q, k, v = torch.split(channels, [keys, keys, channels.shape[1] - 2 * keys], -1)
        share = heads.num_values // heads.num_keys
        q, k = (
            each.view(len(each), heads.num_keys, -1).repeat_interleave(share, 1) for each in (q, k)
        )
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
        v = v.view(len(v), heads.num_values, -1)
        b, a = self.steps[tokens].double().chunk(2, -1)
        decay = torch.exp(heads.rates.double() * F.softplus(a + heads.step_bias, threshold=700))
        out = []
        for i in range(len(v)):
            state = decay[i, :, None, None] * state
            met = torch.einsum("hkv,hk->hv", state, k[i])
            correction = b[i].sigmoid()[:, None] * (v[i] - met)
            state = state + k[i][:, :, None] * correction[:, None, :]
            out.append(torch.einsum("hkv,hk->hv", state, q[i]) * heads.key_dim**-0.5)
        return torch.stack(out), state


@pytest.mark.parametrize(
    ("sizes", "dtype", "bound"),
    [
        ((1, 2, 16, 24), torch.float32, FLOAT32),
        ((2, 2, 24, 40), torch.float32, FLOAT32),
        ((1, 2, 24, 16), torch.bfloat16, BFLOAT16),
        ((1, 2, 128, 128), torch.bfloat16, BFLOAT16),  # as released models have them
        ((1, 1, 16, 16), torch.float16, FLOAT16),
    ],
)
def test_prompts_and_single_tokens_in_one_launch(sizes, dtype, bound, device):
    case = Case(sum(LENGTHS), sizes, device, dtype)
    InRows.of(LENGTHS, case.shape, device).check(case.update, case.written_out, close_by(bound))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 4, 24, 40), (1, 2, 128, 128), (3, 3, 8, 12)])
def test_sequences_of_one_token_each(sizes, dtype, device, assert_close):
    lengths = [1] * 5
    case = Case(5, sizes, device, dtype)
    InRows.of(lengths, case.shape, device).check(case.update, case.written_out, assert_close)


def test_rows_of_padding_leave_other_rows_alone(device, assert_close):
    case = Case(3, (1, 2, 16, 16), device)
    rows = InRows.of([1] * 3, case.shape, device)
    padded = Segments(
        torch.tensor([0, 6, 6], device=device),
        torch.tensor([1, 5, 5], device=device),
        torch.tensor([False, True, True], device=device),
    )
    rows.states.normal_()
    states = rows.states.clone()
    out = case.update(states, [padded])
    y, state = case.written_out(slice(0, 1), rows.states[0].double())
    assert_close(out[:1], y)
    assert_close(states[1], state)
    for row in (0, 2, 3, 4, 6):
        assert torch.equal(states[row], rows.states[row])


def test_a_sequence_cut_anywhere_is_the_whole_one(device):
    lengths = [70, 1, 3]
    case = Case(sum(lengths), (1, 1, 16, 16), device)
    InRows.of(lengths, case.shape, device).check_cuts(case.update)


@pytest.mark.parametrize(
    ("lengths", "dtype", "bound"),
    [
        ([1, 1], torch.float32, 2e-6),
        ([66, 2], torch.float32, FLOAT32),
        ([66, 2], torch.bfloat16, BFLOAT16),
    ],
)
@pytest.mark.parametrize("what", ["forgets at once", "never forgets", "equal keys"])
def test_extreme_heads_are_no_less_exact(what, lengths, dtype, bound, device):
    case = Case(sum(lengths), (1, 2, 16, 16), device, dtype)
    beta, a = case.steps.chunk(2, -1)
    a += 2  # next to exact decays where softplus is
    if what == "forgets at once":  # in the first of two heads; a token in four keeps all
        case.heads.rates[0] = -40.0
        a[::4, 0] = -90.0
        beta[::3] = -90.0  # and is not written
    if what == "never forgets":
        case.heads.rates.zero_()
    if what == "equal keys":  # with a beta of 1 each token replaces what the one before wrote
        case.heads.rates.zero_()
        case.channels[:] = case.channels[:1].clone()
        case.channels[:, 32:] = torch.randn(len(case.channels), 32, device=device).to(dtype)
        beta += 90.0
    InRows.of(lengths, case.shape, device).check(case.update, case.written_out, close_by(bound))


def test_rows_that_are_not_as_expected_are_refused(device):
    case = Case(1, (1, 1, 16, 16), device)
    segments = InRows.of([1], case.shape, device).segments
    for states in (
        torch.zeros((3, 1, 16, 16), dtype=torch.bfloat16, device=device),
        torch.zeros((3, 1, 16, 8), device=device),
        torch.zeros((3, 257), device=device)[:, :256].view(3, 1, 16, 16),
        torch.zeros((3, 1, 16, 16), device=device).mT,
    ):
        with pytest.raises(ValueError, match="states"):
            case.update(states, [segments])
