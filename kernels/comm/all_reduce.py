# mypy: disable-error-code="untyped-decorator"
"""All-reduce of a few rows over memory that every rank can write, fused with add and RMS norm.

    x [T, N] of each rank, residual [T, N]  ->  their sum [T, N]
    with norm_weight [N]:                       and the sum's RMS norm
    x as TableRows:                             rows of a table that is sharded over the ranks

Each rank writes its rows into its inbox in every peer's memory, then waits until its own inboxes
are full. An empty element holds a NaN with all bits set, which no computation produces; a value
with these bits is sent as another NaN. Each element is thus its own flag: stores of an element are
atomic, so no fence and no second message are needed. The reader of an element makes it empty again.

Sums are float32, in rank order, and rounded once: the result is bitwise equal on all ranks.

**Why no rank overwrites an element that is still to be read.** A call must not use the slot of the
previous call; a collective of NCCL in between counts as a call. Let a rank fill the inboxes of a
slot in call g, by this kernel or by the GEMM before it. They were last used in call g - 2 or
earlier. The rank has ended call g - 1, so it has received every peer's data of that call. A peer
sends in call g - 1 after all its kernels up to call g - 2 have ended (`gdc_wait`, or stream order),
and these have read and emptied the elements. Nothing is counted, so nothing wraps around: a rank
may be late by any time, and graphs may be replayed in any order that keeps the rule.

**Why programs cannot deadlock.** All programs of a call run at once, because there are no more than
a device can hold, and each sends all its rows before it waits.

A rank that waits for minutes traps, and every later CUDA call of its process reports the error.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.comm.exchange import deliver, inbox_of, max_looks, slot_start, take, to_words, word
from kernels.comm.inboxes import Inboxes
from kernels.pdl import has_pdl, launch_options

_MAX_WIDTH = 32768
# Without a norm, rows are cut into pieces of this size for separate programs.
_PIECE = 1024
# Fewer than the multiprocessors of any device with NVLink.
_MAX_PROGRAMS = 128
_WARP = 32
_PER_WARP = 256  # elements of a row


@dataclass(frozen=True, slots=True)
class TableRows:
    """A rank's shard of an embedding: its rows of `ids`, and zeros for other ids."""

    table: torch.Tensor  # [V, N], rows of the ids from first_id on
    ids: torch.Tensor  # [T]
    first_id: int


def all_reduce(
    x: torch.Tensor | TableRows,
    inboxes: Inboxes,
    slot: int,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the sum and, with norm_weight, its RMS norm; a collective with equal shapes.

    `slot` must differ from the previous call's, whether all-reduce or all-gather.
    """
    return receive(x, inboxes, slot, residual, norm_weight, eps, sends=True)


def send(x: torch.Tensor | TableRows, inboxes: Inboxes, slot: int) -> None:
    """Sends x to all peers: the first half of `all_reduce`."""
    _launch(x, inboxes, slot, None, None, 0.0, None, None, sends=True, receives=False)


def receive(
    x: torch.Tensor | TableRows,
    inboxes: Inboxes,
    slot: int,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    sends: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Waits for the peers' rows and adds x, this rank's rows: the second half of `all_reduce`."""
    rows = x.table if isinstance(x, TableRows) else x
    total = rows.new_empty((_num_rows(x), rows.shape[1]))
    normed = None if norm_weight is None else torch.empty_like(total)
    _launch(x, inboxes, slot, residual, norm_weight, eps, total, normed, sends, receives=True)
    return total, normed


def _num_rows(x: torch.Tensor | TableRows) -> int:
    return len(x.ids) if isinstance(x, TableRows) else len(x)


def _launch(
    x: torch.Tensor | TableRows,
    inboxes: Inboxes,
    slot: int,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    total: torch.Tensor | None,
    normed: torch.Tensor | None,
    sends: bool,
    receives: bool,
) -> None:
    num_rows = _num_rows(x)
    rows, ids, first_id = (x.table, x.ids, x.first_id) if isinstance(x, TableRows) else (x, None, 0)
    _check(rows, num_rows, inboxes, residual, norm_weight)
    if num_rows == 0:
        return
    width = rows.shape[1]
    if norm_weight is None and ids is None and width % _PIECE == 0:
        num_rows, width = num_rows * width // _PIECE, _PIECE
    # Not less than a warp: with replicated threads, one could read an element another has emptied.
    block = max(_WARP, triton.next_power_of_2(width))
    _all_reduce_kernel[(min(num_rows, _MAX_PROGRAMS),)](
        rows, ids, residual, norm_weight, total, normed,
        inboxes.addresses,
        slot_start(inboxes, slot, rows.element_size()),
        inboxes.num_bytes // rows.element_size(),
        num_rows,
        first_id,
        len(rows),
        eps,
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        N=width,
        BLOCK=block,
        WORD=word(rows),
        HAS_IDS=ids is not None,
        HAS_RESIDUAL=residual is not None,
        NORM=norm_weight is not None,
        SENDS=sends,
        RECEIVES=receives,
        MAX_LOOKS=max_looks(rows),
        PDL=has_pdl(rows),
        num_warps=min(16, max(1, block // _PER_WARP)),
        **launch_options(rows),
    )  # fmt: skip


def _check(
    rows: torch.Tensor,
    num_rows: int,
    inboxes: Inboxes,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> None:
    width = rows.shape[1]
    if not rows.is_contiguous() or rows.element_size() not in (2, 4):
        raise ValueError(f"x must be contiguous, of 2 or 4 bytes an element; got {rows.dtype}")
    num_bytes = num_rows * width * rows.element_size()
    if not inboxes.hold(num_bytes):
        raise ValueError(f"x has {num_bytes} bytes, an inbox {inboxes.num_bytes}")
    if norm_weight is not None and norm_weight.shape != (width,):
        raise ValueError(f"norm_weight must be [{width}]")
    if width > _MAX_WIDTH:
        raise ValueError(f"rows of {width} exceed {_MAX_WIDTH}")
    shape = (num_rows, width)
    if residual is not None and (residual.shape != shape or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous {shape}")
    for name, other in (("residual", residual), ("norm_weight", norm_weight)):
        if other is not None and other.dtype != rows.dtype:
            raise TypeError(f"x is {rows.dtype}, {name} is {other.dtype}")


@triton.jit
def _all_reduce_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    total_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    num_rows: tl.tensor,
    first_id: tl.tensor,
    num_ids: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    MAX_LOOKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK)
    inside = i < N
    if NORM:
        weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if SENDS:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            x = _own(x_ptr, ids_ptr, row, i, first_id, num_ids, N, HAS_IDS)
            deliver(
                to_words(x, WORD), row * N + i, inside, addresses_ptr, slot_start, capacity,
                RANK, SIZE,
            )  # fmt: skip
        tl.debug_barrier()  # keeps the compiler from moving these stores after the following ones
    if RECEIVES:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            # Loaded first, while the peers' words are on their way.
            x = _own(x_ptr, ids_ptr, row, i, first_id, num_ids, N, HAS_IDS)
            if HAS_RESIDUAL:
                residual = tl.load(residual_ptr + row * N + i, mask=inside, other=0.0)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(SIZE):
                if rank == RANK:
                    part = x
                else:
                    inbox = inbox_of(addresses_ptr, RANK, rank, slot_start, capacity, WORD)
                    words = take(inbox + row * N + i, inside, MAX_LOOKS)
                    part = words.to(x_ptr.dtype.element_ty, bitcast=True)
                total += part.to(tl.float32)
            if HAS_RESIDUAL:
                total += residual.to(tl.float32)
            tl.store(total_ptr + row * N + i, total.to(total_ptr.dtype.element_ty), mask=inside)
            if NORM:
                normed = total * tl.rsqrt(tl.sum(total * total, 0) / N + eps)
                normed = normed.to(normed_ptr.dtype.element_ty) * weight
                tl.store(normed_ptr + row * N + i, normed, mask=inside)


@triton.jit
def _own(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    first_id: tl.tensor,
    num_ids: tl.tensor,
    N: tl.constexpr,
    HAS_IDS: tl.constexpr,
) -> tl.tensor:
    """This rank's part of a row, float32; zeros for ids that other ranks have."""
    inside = i < N
    if HAS_IDS:
        row = tl.load(ids_ptr + row).to(tl.int64) - first_id
        inside = i < tl.where((row >= 0) & (row < num_ids), N, 0)
    return tl.load(x_ptr + row * N + i, mask=inside, other=0.0)
