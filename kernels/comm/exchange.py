# mypy: disable-error-code="untyped-decorator"
"""Device functions for inboxes: `deliver` writes words to the peers, `take` reads and empties them.

A word with all bits set is empty. `all_reduce` describes the synchronization.
"""

import torch
import triton
import triton.language as tl

from kernels.comm.inboxes import Inboxes
from kernels.pdl import is_compiled

# Reads of an inbox before a kernel traps, just under a microsecond each: minutes in total.
MAX_LOOKS = 2**28


def max_looks(x: torch.Tensor) -> int:
    """Most reads of an inbox before a kernel traps; 0 in the interpreter, which cannot wait."""
    return MAX_LOOKS if is_compiled(x) else 0


def slot_start(inboxes: Inboxes, slot: int, word_bytes: int) -> int:
    """Offset of a slot in each rank's memory, in words. Raises ValueError for a bad slot."""
    if not 0 <= slot < inboxes.num_slots:
        raise ValueError(f"slot {slot} of {inboxes.num_slots}")
    return slot * inboxes.size * (inboxes.num_bytes // word_bytes)


def word(x: torch.Tensor) -> tl.dtype:
    """The integer type in which elements are sent."""
    return tl.int16 if x.element_size() == 2 else tl.int32


@triton.jit
def to_words(x: tl.tensor, WORD: tl.constexpr) -> tl.tensor:
    """Converts elements to words; a NaN with the bits of an empty word becomes another NaN."""
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
    """Writes words to offsets `at` of this rank's inbox on every peer."""
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
    """Pointer to the sender's inbox in the owner's memory."""
    memory = tl.load(addresses_ptr + owner).to(tl.pointer_type(WORD))
    # The alignment hint lets the compiler vectorize the accesses.
    return tl.multiple_of(memory, 16) + slot_start + sender * capacity


@triton.jit
def take(inbox: tl.tensor, inside: tl.tensor, MAX_LOOKS: tl.constexpr) -> tl.tensor:
    """Waits until all words of `inbox` have arrived, returns them and leaves them empty."""
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
