"""Compiles what rows with adapters launch, for sm_90, at the sizes of an 8B model.

Few rows and many, the narrowest type and the widest, the fewest ranks and the most.
"""

import torch

from kernels.adapters.group_rows import TokenColumns, group_rows
from kernels.adapters.low_rank import add_low_rank
from kernels.adapters.stacks import AdaptedLayer, AdapterStacks, RowGroups
from kernels.sampling.slot_state import NUM_FIELDS
from tests.kernels.compiling import empty, report

QKV = ((0, 4096), (4096, 5120), (5120, 6144))


def words(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def launch() -> None:
    state = empty(256, NUM_FIELDS.value, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        for max_rank in (16, 512):
            stacks = AdapterStacks(empty(32, max_rank * 81920, dtype=dtype), words(32, 3), max_rank)
            for num_rows in (64, 4096):
                columns = TokenColumns(words(2), words(257))
                groups = group_rows(words(256), state, 32, num_rows, columns)
                over_layers(stacks, groups, num_rows, dtype)
    group_rows(words(64), state, 32, 64)


def over_layers(
    stacks: AdapterStacks, groups: RowGroups, num_rows: int, dtype: torch.dtype
) -> None:
    """QKV with a norm before it, and the last product of an MLP without."""
    qkv = AdaptedLayer(1, 4096, 6144, QKV, 0, 3 * 4096, words(48, 3))
    x, y = empty(num_rows, 4096, dtype=dtype), empty(num_rows, 6144, dtype=dtype)
    add_low_rank(x, y, qkv, stacks, groups, 1e-5)
    down = AdaptedLayer(2, 14336, 4096, ((0, 4096),), 30000, 50000, words(32, 3))
    x = empty(num_rows, 14336, dtype=dtype)
    add_low_rank(x, empty(num_rows, 4096, dtype=dtype), down, stacks, groups)


if __name__ == "__main__":
    report(launch)
