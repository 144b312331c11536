# mypy: disable-error-code="untyped-decorator"
"""All-reduce of a few rows over memory that every rank can write, with its neighbours fused.

    x [T, N] of each rank  ->  sum over ranks + residual [T, N]
    with norm_weight [N]:      and the RMS norm of that

Each rank writes its rows into the inbox that each peer keeps for it, then waits until its own
inboxes are full. An empty element holds EMPTY, a NaN of which no computation makes the bits, and a
NaN that has them is sent as another one: so an element is its own flag. It arrives whole, needs no
fence and no second message. Who has read an element makes it empty again.

Sums are float32, in the order of ranks, and rounded once: all ranks have the same bits.

An inbox may be filled again when its owner has read it, and nobody says when that is. But calls
alternate between inboxes: no call uses the slot of the call before it. A rank that fills a slot's
inboxes in call g, last used in call g - 2 or earlier, has ended call g - 1, and so has seen what
each peer sent in it; and a peer sends in call g - 1 after its kernels up to call g - 2 have ended
(`gdc_wait`, or the order of the stream), whose reading and emptying is done. Nothing is counted, so
nothing can wrap around: a rank may be late by any time, and a graph may be replayed any number of
times. A step that ends between two calls is no call: see `PeerMemory`.

Programs are as many as run at the same time, and each sends all its rows before it waits for any:
none waits for one that has no room.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.inboxes import Inboxes
from kernels.pdl import has_pdl, launch_options

_MAX_WIDTH = 32768
# Without a norm rows are no units: a single one is worth several programs.
_PIECE = 1024


def all_reduce(
    x: torch.Tensor,
    inboxes: Inboxes,
    slot: int,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum and its norm, if there is a weight for it; every rank calls it with the same shape.

    The slot must differ from that of the call before.
    """
    total = torch.empty_like(x)
    normed = None if norm_weight is None else torch.empty_like(x)
    _launch(x, inboxes, slot, residual, norm_weight, eps, total, normed)
    return total, normed


def _launch(
    x: torch.Tensor,
    inboxes: Inboxes,
    slot: int,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    total: torch.Tensor,
    normed: torch.Tensor | None,
    sends: bool = True,
    receives: bool = True,
    num_warps: int = 0,
    piece: int = 0,
    max_programs: int = 132,
) -> None:
    capacity = inboxes.num_bytes // x.element_size()
    num_rows, width = x.shape
    if norm_weight is None:
        piece = piece or _PIECE
        if width % piece == 0:
            num_rows, width = num_rows * width // piece, piece
    block = triton.next_power_of_2(width)
    num_warps = num_warps or min(16, max(1, block // 256))
    grid = (min(num_rows, max_programs),)
    _all_reduce_kernel[grid](
        x, residual, norm_weight, total, normed,
        inboxes.addresses,
        slot * inboxes.size * capacity,
        capacity,
        num_rows,
        eps,
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        N=width,
        BLOCK=block,
        WORD=tl.int16 if x.element_size() == 2 else tl.int32,
        HAS_RESIDUAL=residual is not None,
        NORM=norm_weight is not None,
        SENDS=sends,
        RECEIVES=receives,
        PDL=has_pdl(x),
        num_warps=num_warps,
        **launch_options(x),
    )  # fmt: skip


@triton.jit
def _all_reduce_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    total_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK)
    inside = i < N
    if NORM:
        weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    own = tl.load(addresses_ptr + RANK).to(tl.pointer_type(WORD)) + slot_start
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if SENDS:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            x = tl.load(x_ptr + row * N + i, mask=inside, other=0.0)
            words = x.to(WORD, bitcast=True)
            words = tl.where(words == -1, -2, words)
            for shift in tl.static_range(1, SIZE):
                peer = (RANK + shift) % SIZE
                inbox = tl.load(addresses_ptr + peer).to(tl.pointer_type(WORD)) + slot_start
                tl.store(inbox + RANK * capacity + row * N + i, words, mask=inside)
    if RECEIVES:
        tl.debug_barrier()
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(SIZE):
                if rank == RANK:
                    part = tl.load(x_ptr + row * N + i, mask=inside, other=0.0)
                else:
                    inbox = own + rank * capacity + row * N + i
                    words = tl.load(inbox, mask=inside, other=0, volatile=True)
                    while tl.max((words == -1).to(tl.int32), 0) > 0:
                        words = tl.load(inbox, mask=inside, other=0, volatile=True)
                    tl.store(inbox, tl.full([BLOCK], -1, WORD), mask=inside)
                    part = words.to(x_ptr.dtype.element_ty, bitcast=True)
                total += part.to(tl.float32)
            if HAS_RESIDUAL:
                total += tl.load(residual_ptr + row * N + i, mask=inside, other=0.0).to(tl.float32)
            tl.store(total_ptr + row * N + i, total.to(total_ptr.dtype.element_ty), mask=inside)
            if NORM:
                normed = total * tl.rsqrt(tl.sum(total * total, 0) / N + eps)
                normed = normed.to(normed_ptr.dtype.element_ty) * weight
                tl.store(normed_ptr + row * N + i, normed, mask=inside)
