"""Memory of decode attention in which the splits of a sequence meet."""

from dataclasses import dataclass

import torch

# No batch is cut into more slices than this, which bounds the workspace.
MAX_SLICES = 8192


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Memory for partial results of splits. Calls in stream order may share one; graphs must."""

    partial: torch.Tensor  # [slices, group, D] float32
    stats: torch.Tensor  # [slices, 2, group] float32: maximum, sum of exponentials
    arrivals: torch.Tensor  # [slices] int32, zero between calls: the merging program resets it


def decode_workspace(q: torch.Tensor, num_kv_heads: int) -> DecodeWorkspace:
    """A workspace that suits every batch with the heads, head size and device of `q`."""
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    return DecodeWorkspace(
        q.new_empty((MAX_SLICES, group, head_dim), dtype=torch.float32),
        q.new_empty((MAX_SLICES, 2, group), dtype=torch.float32),
        torch.zeros(MAX_SLICES, dtype=torch.int32, device=q.device),
    )
