# mypy: disable-error-code="untyped-decorator"
"""What kernels do with inboxes: `deliver` words into those of the peers, `take` them out again.

A word with all bits set is an empty one. Everything else about them is said in `all_reduce`.
"""

import torch
import triton
import triton.language as tl

from kernels.comm.inboxes import Inboxes
from kernels.pdl import is_compiled

# Looks into an inbox, each most of a microsecond long: minutes, as other collectives wait.
MAX_LOOKS = 2**28


def max_looks(x: torch.Tensor) -> int:
    """How often a kernel looks before it gives up with a trap; 0: an interpreter cannot."""
    return MAX_LOOKS if is_compiled(x) else 0


def slot_start(inboxes: Inboxes, slot: int, word_bytes: int) -> int:
    """Where a slot begins in each memory, in words. Raises ValueError if there is none."""
    if not 0 <= slot < inboxes.num_slots:
        raise ValueError(f"slot {slot} of {inboxes.num_slots}")
    return slot * inboxes.size * (inboxes.num_bytes // word_bytes)


def word(x: torch.Tensor) -> tl.dtype:
    """The type of words that elements are sent as."""
    return tl.int16 if x.element_size() == 2 else tl.int32


@triton.jit
def to_words(x: tl.tensor, WORD: tl.constexpr) -> tl.tensor:
    """Elements as words, none of them empty: a NaN that would be is sent as another one."""
    words = x.to(WORD, bitcast=True)
    return tl.where(words == -1, -2, words)


@triton.jit
def deliver(
    words: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    addresses_ptr: tl.tensor,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Writes words into places `at` of this rank's inboxes with all peers."""
    for distance in tl.static_range(1, SIZE):
        inbox = inbox_of(
            addresses_ptr, (RANK + distance) % SIZE, RANK, slot_start, capacity, words.dtype
        )
        tl.store(inbox + at, words, mask=inside)


@triton.jit
def inbox_of(
    addresses_ptr: tl.tensor,
    owner: tl.constexpr,
    sender: tl.constexpr,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    WORD: tl.constexpr,
) -> tl.tensor:
    """Where the inbox for a sender begins in its owner's memory."""
    memory = tl.load(addresses_ptr + owner).to(tl.pointer_type(WORD))
    # Told to be aligned, or every word would be moved by itself.
    return tl.multiple_of(memory, 16) + slot_start + sender * capacity


@triton.jit
def take(inbox: tl.tensor, inside: tl.tensor, MAX_LOOKS: tl.constexpr) -> tl.tensor:
    """The words of these places once all have come; leaves them empty."""
    words = tl.load(inbox, mask=inside, other=0, volatile=True)
    looks = 0
    while tl.max((words == -1).to(tl.int32), 0) > 0:
        words = tl.load(inbox, mask=inside, other=0, volatile=True)
        if MAX_LOOKS > 0:
            looks += 1
            if looks > MAX_LOOKS:
                tl.inline_asm_elementwise(
                    "trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
    tl.store(inbox, tl.full(words.shape, -1, words.dtype), mask=inside)
    return words
