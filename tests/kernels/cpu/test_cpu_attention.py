"""C attention over the paged KV cache: decode, prompt chunks, and both in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind
from kernels.cpu.library import AttentionArguments, Library
from tests.kernels.cpu.cpu_cases import COMBINATIONS, LIBRARIES, randn, require
from tests.pairs import pairwise

BLOCK_SIZE = 16
# The reference rounds queries and cos/sin to the dtype; the kernel keeps them in float32.
BOUNDS = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=COMBINATIONS)
def library(request: pytest.FixtureRequest) -> Library:
    return require(*request.param)


def with_each_library(names: str, *axes: Sequence[object]) -> pytest.MarkDecorator:
    """Cases of libraries and these axes in which any two values meet."""
    arguments, cases = f"library {names}".split(), pairwise(LIBRARIES, *axes)
    return pytest.mark.parametrize(arguments, cases, indirect=["library"], ids=str)


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention layer."""

    share: int  # query heads per KV head
    num_kv: int
    dim: int
    has_norm: bool


class Step:
    """Sequences over shuffled blocks; each computes its last tokens."""

    def __init__(
        self,
        dtype: torch.dtype,
        heads: Heads,
        contexts: list[int],
        num_new: list[int],
        window: int | None = None,
        softcap: float | None = None,
        *,
        has_sinks: bool = False,
    ) -> None:
        num_kv, dim = heads.num_kv, heads.dim
        num_heads = heads.share * num_kv
        self.heads = heads
        self.block_rows = BLOCK_SIZE
        self.kind = AttentionKind(heads.dim**-0.5, window, softcap=softcap, has_sinks=has_sinks)
        widths = [-(-context // BLOCK_SIZE) for context in contexts]
        ids = (torch.randperm(sum(widths), generator=torch.Generator().manual_seed(1)) + 1).int()
        self.tables = torch.zeros(len(contexts), max(widths) + 1, dtype=torch.int32)
        for row, blocks in zip(self.tables, ids.split(widths), strict=True):
            row[: len(blocks)] = blocks
        self.lens = torch.tensor(contexts, dtype=torch.int32)
        self.starts = torch.tensor([0, *num_new]).cumsum(0).int()
        new = [torch.arange(c - n, c) for c, n in zip(contexts, num_new, strict=True)]
        self.positions = torch.cat(new)
        self.slots = torch.cat(
            [_slots(table, p) for table, p in zip(self.tables, new, strict=True)]
        )
        self.cache = randn(dtype, (sum(widths) + 1) * BLOCK_SIZE, 2, num_kv, dim, seed=2)
        self.kv_scales: Tensor | None = None
        self.key_offsets: Tensor | None = None
        self.qkv = randn(dtype, sum(num_new), (num_heads + 2 * num_kv) * dim, seed=3)
        angles = torch.arange(max(contexts))[:, None] / 10 ** torch.linspace(0, 3, dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        # Some take most of the softmax, some nearly nothing.
        self.sinks = 3 * randn(torch.float32, num_heads, seed=5) if has_sinks else None
        self.qk_norm = randn(dtype, num_heads + num_kv, dim, seed=4) if heads.has_norm else None

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, cache) by the reference."""
        num_kv, dim = self.heads.num_kv, self.heads.dim
        num_heads = self.heads.share * num_kv
        qk, v = self.qkv.view(len(self.qkv), -1, dim).split((num_heads + num_kv, num_kv), 1)
        if self.qk_norm is not None:
            qk = reference.rms_norm(qk, self.qk_norm, 1e-5)
        q, k = qk.split((num_heads, num_kv), 1)
        q, k = reference.rotary_embedding(q, k, self.positions, self.cos_sin)
        cache = self.cache.clone()
        cache[self.slots, 0], cache[self.slots, 1] = k, v
        k_cache, v_cache = cache.view(-1, BLOCK_SIZE, 2, num_kv, dim).unbind(2)
        longest = int(self.starts.diff().max())
        out = reference.paged_attention(
            q,
            k_cache,
            v_cache,
            self.tables,
            self.lens,
            self.starts,
            longest,
            self.kind,
            sinks=self.sinks,
        )
        return out.flatten(1), cache

    def run(self, library: Library) -> tuple[Tensor, Tensor]:
        """(out, cache) by the C kernel."""
        heads, cache = self.heads, self.cache.clone()
        num_heads = heads.share * heads.num_kv
        arguments = AttentionArguments(
            num_heads, heads.num_kv, heads.dim, BLOCK_SIZE, self.block_rows, self.tables.shape[1],
            self.kind.window or 0, self.kind.scale, 1e-5, self.kind.softcap or 0,
            self.cos_sin.data_ptr(),
            self.positions.data_ptr(), self.slots.data_ptr(), self.tables.data_ptr(),
            self.lens.data_ptr(), self.starts.data_ptr(), len(self.qkv), len(self.lens),
        )  # fmt: skip
        out = self.qkv.new_empty((len(self.qkv), num_heads * heads.dim))
        offsets = self.key_offsets
        norm = None if self.qk_norm is None else self.qk_norm.float()
        library.attend(arguments, self.qkv, norm, cache, self.kv_scales, out, offsets, self.sinks)
        return out, cache


def _slots(table: Tensor, positions: Tensor) -> Tensor:
    return table.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def check(library: Library, step: Step) -> None:
    for actual, wanted in zip(step.run(library), step.expected(), strict=True):
        distance = (actual.double() - wanted.double()).norm()
        assert distance <= BOUNDS[library.dtype] * wanted.double().norm()


SHAPES = [
    Heads(1, 3, 64, has_norm=False),
    Heads(2, 1, 16, has_norm=True),
    Heads(3, 3, 64, has_norm=False),
    Heads(4, 2, 80, has_norm=True),
    Heads(7, 1, 20, has_norm=False),
    Heads(5, 2, 256, has_norm=True),
    Heads(96, 1, 2, has_norm=False),
]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_single_tokens(library: Library, heads: Heads) -> None:
    contexts = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 33, 300]
    check(library, Step(library.dtype, heads, contexts, [1] * 6))


def test_contexts_longer_than_what_is_loaded_ahead(library: Library) -> None:
    """A row of keys and values takes 4 KiB or more: 256 KiB are at most 64 tokens."""
    heads = Heads(6, 4, 256, has_norm=False)
    check(library, Step(library.dtype, heads, [63, 64, 65, 200], [1] * 4))


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_parts_of_prompts(library: Library, heads: Heads) -> None:
    """Whole prompts, later chunks of prompts, and decodes in between."""
    check(library, Step(library.dtype, heads, [2, 40, 77, 100, 130], [2, 1, 77, 33, 3]))


@with_each_library("heads window", SHAPES[:4], [1, 3, 31, 32, 33, 63, 64, 65, 130, 1000])
def test_a_window_over_single_tokens_and_parts_of_prompts(
    library: Library, heads: Heads, window: int
) -> None:
    lens, new = [1, window, window + 1, 300, 250, 129, 200], [1, 1, 1, 1, 250, 2, 77]
    check(library, Step(library.dtype, heads, lens, new, window))


@with_each_library("heads window softcap", SHAPES[:4], [None, 33], [0.5, 20.0, None])
def test_scores_with_a_cap_or_with_sinks(
    library: Library, heads: Heads, window: int | None, softcap: float | None
) -> None:
    lens, new = [1, 2, 300, 250, 129, 200], [1, 2, 1, 250, 2, 77]
    has_sinks = softcap is None
    check(library, Step(library.dtype, heads, lens, new, window, softcap, has_sinks=has_sinks))


def test_a_sink_takes_nearly_all_or_nothing(library: Library) -> None:
    heads = Heads(3, 2, 64, has_norm=False)
    step = Step(library.dtype, heads, [70, 40], [70, 1], has_sinks=True)
    assert step.sinks is not None
    step.sinks[::2], step.sinks[1::2] = 90.0, float("-inf")
    out = step.run(library)[0].view(-1, 6, 64)
    assert out[:, ::2].abs().max().item() < 1e-20
    step.sinks = None
    assert torch.allclose(out[:, 1::2], step.run(library)[0].view(-1, 6, 64)[:, 1::2])


@with_each_library("heads window", SHAPES[:4], [2, 31, 33, 64, 130])
def test_blocks_before_a_window_change_nothing(library: Library, heads: Heads, window: int) -> None:
    """They may be another sequence's: the null block stands for them here, and is NaN."""
    lens, new = [300, 250, 129, 200], [1, 60, 2, 77]
    step = Step(library.dtype, heads, lens, new, window)
    step.cache[:BLOCK_SIZE] = float("nan")
    whole, _ = step.run(library)
    for table, length, count in zip(step.tables, lens, new, strict=True):
        table[: max(0, length - count - window + 1) // BLOCK_SIZE] = 0
    assert (step.tables[:, 0] == 0).any()
    assert whole.isfinite().all()
    assert torch.equal(step.run(library)[0], whole)


@pytest.mark.parametrize("heads", SHAPES[:4], ids=str)
def test_blocks_may_lie_apart(library: Library, heads: Heads) -> None:
    """Blocks of a layer lie so in pages that hold other layers, too."""
    step = Step(library.dtype, heads, [1, 33, 300, 77], [1, 1, 1, 40], 33)
    wanted, cache = step.run(library)
    blocks = step.cache.view(-1, BLOCK_SIZE, *step.cache.shape[1:])
    step.block_rows = BLOCK_SIZE + 7
    apart = blocks.new_full((len(blocks), step.block_rows, *blocks.shape[2:]), float("nan"))
    apart[:, :BLOCK_SIZE] = blocks
    step.cache = apart.flatten(0, 1)
    step.slots = step.slots + step.slots // BLOCK_SIZE * 7
    found, after = step.run(library)
    assert torch.equal(found, wanted)
    kept = after.view(len(blocks), step.block_rows, *blocks.shape[2:])[:, :BLOCK_SIZE]
    assert torch.equal(kept.flatten(0, 1), cache)


@pytest.mark.parametrize("window", [None, 33])
def test_a_row_does_not_depend_on_its_neighbours(library: Library, window: int | None) -> None:
    heads = Heads(3, 3, 64, has_norm=False)
    whole = Step(library.dtype, heads, [90, 50, 70], [90, 1, 40], window)
    together, cache = whole.run(library)
    for index in range(3):
        begin, end = int(whole.starts[index]), int(whole.starts[index + 1])
        for first in (begin, end - 1 if end - begin == 1 else end - 7):
            alone = Step(library.dtype, heads, [90, 50, 70], [90, 1, 40], window)
            alone.cache = cache
            alone.qkv = whole.qkv[first:end]
            alone.positions, alone.slots = whole.positions[first:end], whole.slots[first:end]
            alone.tables, alone.lens = (
                whole.tables[index : index + 1],
                whole.lens[index : index + 1],
            )
            alone.starts = torch.tensor([0, end - first], dtype=torch.int32)
            assert torch.equal(alone.run(library)[0], together[first:end])


def test_rows_of_no_sequence_and_without_context_get_zeros(library: Library) -> None:
    step = Step(library.dtype, Heads(2, 1, 16, has_norm=False), [5, 9, 4], [1, 3, 1])
    step.lens[0] = step.lens[1] = 0
    step.starts = step.starts[:3]
    step.slots[[0, 1, 2, 3, 4]] = -1
    step.lens, step.tables = step.lens[:2], step.tables[:2]
    out, cache = step.run(library)
    assert torch.equal(cache, step.cache)
    assert out.count_nonzero() == 0
