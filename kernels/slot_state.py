"""A sequence's numbers on the device: one row of int64 per slot, as kernels and host both see it.

    slot_state [max_num_seqs, NUM_FIELDS] int64

Known tokens, prompt tokens, top-k and the seed's bits are integers; temperature, top-p and min-p
are the bits of a float32. Whoever writes a row writes all of it; a sampled token adds one to the
first field and changes nothing else.
"""

import triton.language as tl

NUM_TOKENS = tl.constexpr(0)
NUM_PROMPT = tl.constexpr(1)
SEED = tl.constexpr(2)
TOP_K = tl.constexpr(3)  # 0 is off
TEMPERATURE = tl.constexpr(4)
TOP_P = tl.constexpr(5)
MIN_P = tl.constexpr(6)
NUM_FIELDS = tl.constexpr(8)
