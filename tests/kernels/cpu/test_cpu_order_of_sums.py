"""A query's bits do not depend on how many are computed together, nor on how a prompt was cut."""

import pytest
import torch
from torch import Tensor

from kernels import fp8
from kernels.cpu.library import Library
from tests.kernels.cpu.cpu_cases import COMBINATIONS, require
from tests.kernels.cpu.test_cpu_attention import SHAPES, Step
from tests.kernels.cpu.test_cpu_fp8 import PAIRS

CONTEXT = 133  # four tiles of keys and a part of one; the queries of several blocks
CHUNKS = (1, 2, 1, 7, 40, 3, 1, 33, 45)
# All types on all instruction sets, and caches in FP8 as in test_cpu_fp8.
KINDS = [*((*one.values[0], None) for one in COMBINATIONS), *PAIRS]


def in_parts(library: Library, whole: Step, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(out, cache), where each part of the sequence is a row of its own of one step."""
    ends = torch.tensor(sizes).cumsum(0).int()
    step = Step.__new__(Step)
    vars(step).update(vars(whole))
    step.lens, step.starts = ends, torch.cat((torch.zeros(1, dtype=torch.int32), ends))
    step.tables = whole.tables.expand(len(sizes), -1).contiguous()
    return step.run(library)


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), KINDS)
def test_attention_rounds_alike_token_by_token_in_chunks_and_at_once(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    library = require(name, dtype, kv_dtype)
    plain = [(heads, None, False) for heads in SHAPES]
    for heads, softcap, has_sinks in (*plain, (SHAPES[2], 5.0, False), (SHAPES[3], None, True)):
        whole = Step(
            library.dtype, heads, [CONTEXT], [CONTEXT], softcap=softcap, has_sinks=has_sinks
        )
        if kv_dtype is not None:
            whole.kv_scales = fp8.scale_table(*torch.rand(2, heads.num_kv) + 0.1)
            whole.cache = fp8.narrowed(whole.cache, whole.kv_scales[2:], kv_dtype)
        out, cache = whole.run(library)
        for sizes in ((1,) * CONTEXT, CHUNKS):
            same_out, same_cache = in_parts(library, whole, sizes)
            assert torch.equal(same_out, out), heads
            assert torch.equal(same_cache.view(torch.uint8), cache.view(torch.uint8)), heads
