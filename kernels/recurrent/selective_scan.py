"""The scan of Mamba-2 and its norm in plain PyTorch; also used on CPU.

Each function takes B sequences with N tokens each and their states, and returns the states after
the last token; the states that are given are not written.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a prompt that are computed together. Work within a chunk grows with its length, and the
# number of operations with the number of chunks.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class HeadParameters:
    """Numbers of each head of Mamba-2, [H] and float32."""

    decay: Tensor  # below 0: a state becomes exp(decay * step) of itself in a token
    skip: Tensor  # the part of a head's input that is added to its output


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """Heads of one size, and groups of them that share what is written and read."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    parameters: HeadParameters
    step_bias: Tensor  # [H] float32, added to steps before their softplus


def selective_scan(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, heads: HeadParameters, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2 over x [B, N, H, P], steps [B, N, H], b and c [B, N, G, S].

    For each token and head `state = exp(decay * step) * state + step * x b^T`, then
    `y = state c + skip * x`; H / G heads have the same b and c. `state` is [B, H, P, S] and
    float32. Returns y as x and the state after the last token.
    """
    inputs = x.float()
    if x.shape[1] == 1:
        y, state = _scan_one(inputs, steps, b.float(), c.float(), heads.decay, state)
    else:
        y, state = _scan_chunks(inputs, steps, b.float(), c.float(), heads.decay, state)
    return (y + heads.skip[:, None] * inputs).to(x.dtype), state


def _scan_one(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of one token, without the skip."""
    share = x.shape[2] // b.shape[2]
    b, c = (each[:, 0].repeat_interleave(share, dim=1) for each in (b, c))  # [B, H, S]
    kept = torch.exp(decay * steps[:, 0])  # [B, H]
    scaled = steps[:, 0, :, None] * x[:, 0]  # [B, H, P]
    state = torch.addcmul(kept[..., None, None] * state, scaled[..., None], b[:, :, None])
    return (state @ c[..., None]).squeeze(-1).unsqueeze(1), state


def _scan_chunks(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of all tokens, some at a time, without the skip."""
    parts = []
    for begin in range(0, x.shape[1], CHUNK):
        span = slice(begin, begin + CHUNK)
        part = x[:, span], steps[:, span], b[:, span], c[:, span]
        y, state = _scan_chunk(*part, decay, state)
        parts.append(y)
    return torch.cat(parts, dim=1), state


def _scan_chunk(
    x: Tensor, steps: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of L tokens as products of matrices, without the skip."""
    num_rows, length, num_heads, _ = x.shape
    share = num_heads // b.shape[2]
    # Logarithms of decays from the chunk's start, [B, H, L]. Their differences are small next to
    # them, so they are taken in float64.
    ends = (decay * steps).double().cumsum(1).transpose(1, 2)
    between = (ends[..., :, None] - ends[..., None, :]).float()  # from token j to token i
    later = torch.ones((length, length), dtype=torch.bool, device=x.device).triu(1)
    decays = between.masked_fill_(later, float("-inf")).exp_()  # [B, H, L, L]
    ends_f = ends.float()
    b, c = (each.transpose(1, 2) for each in (b, c))  # [B, G, L, S]
    scaled = (x * steps[..., None]).transpose(1, 2)  # [B, H, L, P]
    of_group = (num_rows, -1, share, length, length)
    weights = (decays.view(of_group) * (c @ b.transpose(-1, -2)).unsqueeze(2)).view_as(decays)
    b, c = (each.repeat_interleave(share, dim=1) for each in (b, c))  # [B, H, L, S]
    y = weights @ scaled + ends_f.exp()[..., None] * (c @ state.transpose(-1, -2))
    remaining = decays[..., -1, :, None]  # from each token to the last one
    state = ends_f[..., -1, None, None].exp() * state + (scaled * remaining).transpose(-1, -2) @ b
    return y.transpose(1, 2), state


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """RMS norm of x * silu(gate) [..., I] by groups of I / num_groups, in float32; then weight."""
    gated = x.float() * F.silu(gate.float())
    groups = gated.view(*x.shape[:-1], num_groups, -1)
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.view(x.shape).to(x.dtype)
