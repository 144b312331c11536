"""The scan of Mamba-2 over the tokens of many sequences at once, with states in a memory by slot.

    channels [T, H P + 2 G N], steps [T, H], states [R, H, P, N]  ->  [T, H P]

Channels are inputs x of all heads, then b and c of all groups; steps are those before their bias
and softplus. The scan is that of `selective_scan.selective_scan`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.recurrent.scan_chunks import scan_by_chunks
from kernels.recurrent.scan_step import scan_one_token
from kernels.recurrent.segments import Segments, check_rows
from kernels.recurrent.selective_scan import ScanHeads


def update_mamba2(
    channels: Tensor,
    steps: Tensor,
    heads: ScanHeads,
    states: Tensor,
    waves: Sequence[Segments],
) -> Tensor:
    """Returns the outputs of all tokens, and writes the states after each segment.

    A segment of a later wave may read what an earlier one has written.
    """
    inner = heads.num_heads * heads.head_dim
    width = inner + 2 * heads.num_groups * heads.state_size
    if channels.shape[1] != width or channels.stride(1) != 1:
        raise ValueError(f"channels must have rows of {width}, got {tuple(channels.shape)}")
    if steps.shape != (len(channels), heads.num_heads) or steps.stride(1) != 1:
        raise ValueError(f"steps must have a number a head, got {tuple(steps.shape)}")
    if states.dtype != torch.float32:
        raise ValueError(f"states must be float32, got {states.dtype}")
    check_rows(states, (heads.num_heads, heads.head_dim, heads.state_size), alignment=4)
    out = channels.new_empty((len(channels), inner))
    for segments in waves:
        scan_one_token(channels, steps, heads, states, segments, out)
        if segments.bounds is not None:
            scan_by_chunks(channels, steps, heads, states, segments, out)
    return out
