# mypy: disable-error-code="untyped-decorator"
"""A sequence's numbers on the device: one row of int64 per slot, as kernels and host both see it.

    slot_state [max_num_seqs, NUM_FIELDS] int64

Known tokens, prompt tokens, top-k and the seed's bits are integers; temperature, top-p and min-p
are the bits of a float32. A row is always written as a whole; a sampled token adds one to the
first field and changes nothing else.
"""

import triton
import triton.language as tl

NUM_TOKENS = tl.constexpr(0)
NUM_PROMPT = tl.constexpr(1)
SEED = tl.constexpr(2)
TOP_K = tl.constexpr(3)  # 0 is off
TEMPERATURE = tl.constexpr(4)
TOP_P = tl.constexpr(5)
MIN_P = tl.constexpr(6)
NUM_FIELDS = tl.constexpr(8)

# Below this a temperature counts as 0. Kernels import nothing of ours: a test compares it with the
# services' GREEDY_TEMPERATURE.
GREEDY_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit
def load_float(field: tl.tensor) -> tl.tensor:
    """The float32 whose bits are in a field."""
    return tl.load(field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def filtering_temperature(state: tl.tensor) -> tl.tensor:
    """The temperature of a slot that samples from less than the vocabulary; 0 for any other."""
    temperature = load_float(state + TEMPERATURE)
    top_p, min_p = load_float(state + TOP_P), load_float(state + MIN_P)
    filters = (tl.load(state + TOP_K) > 0) | (top_p < 1.0) | (min_p > 0.0)
    return tl.where(filters & (temperature >= GREEDY_TEMPERATURE), temperature, 0.0)
