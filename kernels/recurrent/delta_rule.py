"""Gated delta nets in plain PyTorch; also used on CPU.

Each function takes N tokens of each of B sequences and, where it has one, their state, and returns
the state after the last token. Nothing that is given is written.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a prompt that are computed together: work within a chunk grows with its square, and the
# number of operations with the number of chunks.
CHUNK = 64
EPS = 1e-6  # in the sum of squares by which queries and keys get unit length


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of keys and of values, and two numbers of each value head, [V] and float32."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    rates: Tensor  # below 0: the logarithm of a token's decay is this times a softplus
    step_bias: Tensor  # added to what the softplus is of


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension times silu(gate), in float32; in the type of the gate."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight.float() * F.silu(gate.float())).to(gate.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over q and k [B, N, K, dk], v [B, N, V, dv], in float32.

    For each token and value head the state S [dk, dv] becomes exp(decay_log) * S, then
    S + k (beta * (v - S^T k))^T, and the output is S^T q / sqrt(dk), with q and k of unit length.
    `decay_log` and `beta` are [B, N, V], `state` [B, V, dk, dv] float32; V / K consecutive value
    heads have the same q and k. Returns outputs [B, N, V, dv] float32 and the last state.
    """
    num_keys, share = q.shape[2], v.shape[2] // q.shape[2]
    q, k = _unit(q.float()) * q.shape[-1] ** -0.5, _unit(k.float())
    # [B, K, V / K, N, ...] each: keys and queries are not copied for the heads that share them.
    q, k = (each.transpose(1, 2).unsqueeze(2) for each in (q, k))
    values, decays, betas = (
        each.float().view(*each.shape[:2], num_keys, share, *each.shape[3:]).movedim(1, 3)
        for each in (v, decay_log, beta)
    )
    state = state.view(len(state), num_keys, share, *state.shape[2:])
    if v.shape[1] == 1:
        out, state = _one_token(q, k, values, decays, betas, state)
    else:
        parts = []
        for begin in range(0, v.shape[1], CHUNK):
            span = slice(begin, begin + CHUNK)
            part, state = _chunk(
                q[..., span, :],
                k[..., span, :],
                values[..., span, :],
                decays[..., span],
                betas[..., span],
                state,
            )
            parts.append(part)
        out = torch.cat(parts, dim=3)
    return out.movedim(3, 1).flatten(2, 3), state.flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule of one token, with N = 1."""
    state = state * decay_log.exp().unsqueeze(-1)
    correction = beta.unsqueeze(-1) * (v - k @ state)  # [B, K, V / K, 1, dv]
    state = state + k.transpose(-1, -2) * correction
    return q @ state, state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule of N tokens by a triangular system in place of N steps.

    A token's correction depends on those of the tokens before it, which its key meets in the state
    as they have decayed since.
    """
    since = decay_log.cumsum(-1)  # of the state at the beginning, after each token's decay
    between = (since.unsqueeze(-1) - since.unsqueeze(-2)).tril().exp().tril()  # [..., N, N]
    kept = since.exp().unsqueeze(-1)
    wanted = beta.unsqueeze(-1) * (v - kept * (k @ state))
    meets = beta.unsqueeze(-1) * between * (k @ k.transpose(-1, -2))
    corrections = torch.linalg.solve_triangular(meets, wanted, upper=False, unitriangular=True)
    out = kept * (q @ state) + (between * (q @ k.transpose(-1, -2))) @ corrections
    left = (since[..., -1:] - since).exp().unsqueeze(-1)
    state = kept[..., -1:, :] * state + (left * k).transpose(-1, -2) @ corrections
    return out, state
