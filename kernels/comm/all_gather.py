# mypy: disable-error-code="untyped-decorator"
"""All-gather of small tensors over the ranks' inboxes, with the synchronization of `all_reduce`.

    x of any shape, of each rank  ->  [size, *shape], in rank order

Elements may have any bits, so each 32-bit word is sent in 64 bits; an empty word has all bits set.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.comm.exchange import deliver, inbox_of, max_looks, slot_start, take
from kernels.comm.inboxes import Inboxes
from kernels.pdl import has_pdl, launch_options

_WORD_BYTES = 4
_BLOCK = 1024
_MAX_WORDS = 128 * _BLOCK  # all programs must run at once


def fits(num_bytes: int, inboxes: Inboxes) -> bool:
    """True if this kernel can gather num_bytes per rank."""
    num_words, rest = divmod(num_bytes, _WORD_BYTES)
    return 0 < num_words <= _MAX_WORDS and rest == 0 and inboxes.hold(8 * num_words)


def all_gather(x: torch.Tensor, inboxes: Inboxes, slot: int) -> torch.Tensor:
    """Gathers x of all ranks, a collective with equal shapes. `slot` is as in `all_reduce`."""
    return receive(x, inboxes, slot, sends=True)


def send(x: torch.Tensor, inboxes: Inboxes, slot: int) -> None:
    """Sends x to all peers: the first half of `all_gather`."""
    _launch(x, inboxes, slot, None, sends=True)


def receive(x: torch.Tensor, inboxes: Inboxes, slot: int, sends: bool = False) -> torch.Tensor:
    """Waits for the peers' tensors: the second half of `all_gather`."""
    out = x.new_empty((inboxes.size, *x.shape))
    _launch(x, inboxes, slot, out, sends)
    return out


def _launch(
    x: torch.Tensor, inboxes: Inboxes, slot: int, out: torch.Tensor | None, sends: bool
) -> None:
    if not x.is_contiguous() or not fits(x.nbytes, inboxes):
        raise ValueError(f"x must be contiguous words of 32 bits; got {x.nbytes} bytes")
    words = x.view(-1).view(torch.int32)
    _all_gather_kernel[(triton.cdiv(len(words), _BLOCK),)](
        words, None if out is None else out.view(-1).view(torch.int32),
        inboxes.addresses,
        slot_start(inboxes, slot, 8),
        inboxes.num_bytes // 8,
        len(words),
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        BLOCK=_BLOCK,
        SENDS=sends,
        RECEIVES=out is not None,
        MAX_LOOKS=max_looks(x),
        PDL=has_pdl(x),
        **launch_options(x),
    )  # fmt: skip


@triton.jit
def _all_gather_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    num_words: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    MAX_LOOKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_words
    x = tl.load(x_ptr + i, mask=inside, other=0)
    if SENDS:
        sent = x.to(tl.uint32, bitcast=True).to(tl.int64)
        deliver(sent, i, inside, addresses_ptr, slot_start, capacity, RANK, SIZE)
        tl.debug_barrier()  # as in all_reduce
    if RECEIVES:
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                words = x
            else:
                inbox = inbox_of(addresses_ptr, RANK, rank, slot_start, capacity, tl.int64)
                words = take(inbox + i, inside, MAX_LOOKS).to(tl.int32)
            tl.store(out_ptr + rank * num_words + i, words, mask=inside)
