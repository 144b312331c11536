"""Convolutions and the scan of Mamba-2 against their definitions, written out token by token."""

import pytest
import torch
from torch import Tensor

from kernels.recurrent import selective_scan as reference
from kernels.recurrent.convolution import causal_conv
from kernels.recurrent.selective_scan import CHUNK, HeadParameters

HEADS, GROUPS, DIM, STATE = 6, 2, 5, 7  # three heads have the same b and c
EPS = 1e-5


def draw(num_rows: int, length: int, decay: float = 1.0) -> tuple[list[Tensor], HeadParameters]:
    """The inputs x, steps, b and c of a scan and its state, and what heads have of their own."""
    torch.manual_seed(length)
    inputs = [
        torch.randn(num_rows, length, HEADS, DIM),
        torch.rand(num_rows, length, HEADS) * 0.5,
        torch.randn(num_rows, length, GROUPS, STATE),
        torch.randn(num_rows, length, GROUPS, STATE),
        torch.randn(num_rows, HEADS, DIM, STATE),
    ]
    decays = -decay * (torch.arange(HEADS) + 1.0)
    return inputs, HeadParameters(decays, torch.randn(HEADS))


def written_out(inputs: list[Tensor], heads: HeadParameters) -> tuple[Tensor, Tensor]:
    """The recurrence in float64 -> (y, state)."""
    x, steps, b, c, state = (each.double().clone() for each in inputs)
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        for token in range(x.shape[1]):
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                step, held = steps[row, token, head], state[row, head]
                held *= torch.exp(heads.decay[head].double() * step)
                held += step * torch.outer(x[row, token, head], b[row, token, group])
                y[row, token, head] = held @ c[row, token, group]
                y[row, token, head] += heads.skip[head].double() * x[row, token, head]
    return y, state


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_a_scan_is_the_recurrence(length: int) -> None:
    inputs, heads = draw(1, length)
    before = inputs[-1].clone()
    y, state = reference.selective_scan(*inputs[:4], heads, inputs[4])
    expected_y, expected_state = written_out(inputs, heads)
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs[-1], before)


def test_rows_of_one_token_do_not_mix() -> None:
    inputs, heads = draw(3, 1)
    y, state = reference.selective_scan(*inputs[:4], heads, inputs[4])
    expected_y, expected_state = written_out(inputs, heads)
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-5)


def test_heads_that_forget_at_once_are_no_less_exact() -> None:
    inputs, heads = draw(1, CHUNK, decay=100.0)  # the sum of logarithms is about -10,000
    y, _ = reference.selective_scan(*inputs[:4], heads, inputs[4])
    torch.testing.assert_close(y.double(), written_out(inputs, heads)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 5])
def test_a_scan_that_was_cut_is_the_whole_one(cut: int) -> None:
    inputs, heads = draw(1, CHUNK + 6)
    whole, state = reference.selective_scan(*inputs[:4], heads, inputs[4])
    first, held = reference.selective_scan(*(x[:, :cut] for x in inputs[:4]), heads, inputs[4])
    second, held = reference.selective_scan(*(x[:, cut:] for x in inputs[:4]), heads, held)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(held, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_sees_the_inputs_before_wherever_it_is_cut(
    width: int, has_bias: bool
) -> None:
    torch.manual_seed(width)
    x, weight, channels = torch.randn(2, 6, 3), torch.randn(3, width), 3
    bias = torch.randn(channels) if has_bias else None
    zeros = torch.zeros(2, channels, width - 1)
    expected = torch.zeros(2, 6, channels) if bias is None else bias.expand(2, 6, channels).clone()
    for token in range(6):
        for back in range(min(width, token + 1)):
            expected[:, token] += x[:, token - back] * weight[:, width - 1 - back]
    for cut in range(1, 7):
        first, state = causal_conv(x[:, :cut], zeros, weight, bias)
        parts = [first]
        for token in range(cut, 6):
            one, state = causal_conv(x[:, token : token + 1], state, weight, bias)
            parts.append(one)
        torch.testing.assert_close(torch.cat(parts, 1), expected)
        assert torch.equal(state, x[:, 6 - (width - 1) :].transpose(1, 2))


def test_a_gated_norm_is_of_each_group() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    gated = x * gate * gate.sigmoid()
    expected = torch.cat(
        [half / (half.pow(2).mean(-1, keepdim=True) + EPS).sqrt() for half in gated.split(4, -1)],
        -1,
    )
    found = reference.gated_rms_norm(x, gate, weight, 2, EPS)
    torch.testing.assert_close(found, expected * weight)
