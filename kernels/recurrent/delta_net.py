"""The gated delta rule over the tokens of many sequences at once, with states in a memory by slot.

    channels [T, 2 K dk + V dv], steps [T, 2 V], states [R, V, dk, dv]  ->  [T, V, dv] float32

Channels are queries, keys and values of all heads; of `steps` the first half is beta before its
sigmoid, the second is what decays are made of. The rule is that of `delta_rule.gated_delta_rule`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.recurrent.delta_chunks import update_by_chunks
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.delta_step import update_by_one_token
from kernels.recurrent.segments import Segments, check_rows


def update_delta_net(
    channels: Tensor,
    steps: Tensor,
    heads: DeltaHeads,
    states: Tensor,
    waves: Sequence[Segments],
) -> Tensor:
    """Returns the outputs of all tokens, and writes the states after each segment.

    A segment of a later wave may read what an earlier one has written.
    """
    width = 2 * heads.num_keys * heads.key_dim + heads.num_values * heads.value_dim
    if channels.shape[1] != width or channels.stride(1) != 1:
        raise ValueError(f"channels must have rows of {width}, got {tuple(channels.shape)}")
    if steps.shape != (len(channels), 2 * heads.num_values) or steps.stride(1) != 1:
        raise ValueError(f"steps must have two numbers a head, got {tuple(steps.shape)}")
    if states.dtype != torch.float32:
        raise ValueError(f"states must be float32, got {states.dtype}")
    check_rows(states, (heads.num_values, heads.key_dim, heads.value_dim), alignment=4)
    shape = len(channels), heads.num_values, heads.value_dim
    out = channels.new_empty(shape, dtype=torch.float32)
    for segments in waves:
        update_by_one_token(channels, steps, heads, states, segments, out)
        if segments.bounds is not None:
            update_by_chunks(channels, steps, heads, states, segments, out)
    return out
