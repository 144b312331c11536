# mypy: disable-error-code="untyped-decorator"
"""Sampling state of the slots on the device, one row of int64 per slot.

    slot_state [max_num_seqs, NUM_FIELDS] int64

Token counts, top-k and the seed's bits are integers; temperature, top-p and min-p are the bits of a
float32. The host writes whole rows; a sampled token only increments the first field.
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
ADAPTER = tl.constexpr(7)  # 1 + its place on the device; 0: none
NUM_FIELDS = tl.constexpr(8)

# Temperatures below this are greedy. Kernels import nothing from services; a test compares it with
# their GREEDY_TEMPERATURE.
GREEDY_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit
def load_float(field: tl.tensor) -> tl.tensor:
    """The float32 value of a field's bits."""
    return tl.load(field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def filtering_temperature(state: tl.tensor) -> tl.tensor:
    """The temperature of a slot with top-k, top-p or min-p; 0 for greedy and unfiltered slots."""
    temperature = load_float(state + TEMPERATURE)
    top_p, min_p = load_float(state + TOP_P), load_float(state + MIN_P)
    filters = (tl.load(state + TOP_K) > 0) | (top_p < 1.0) | (min_p > 0.0)
    return tl.where(filters & (temperature >= GREEDY_TEMPERATURE), temperature, 0.0)
