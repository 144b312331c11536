"""Random numbers as a pure function of (seed, output position).

One uniform number per sampled token, from a 64-bit mixing hash in integer tensor operations that
give the same bits on every device. Nothing is drawn in advance and nothing is remembered, so a
batch, a slot, a preemption or a restart cannot change what a request gets. One number per token,
not one per vocabulary entry: the sampler inverts a distribution with it, which costs one hash per
row where a race over the vocabulary would cost 150,000.
"""

from torch import Tensor


def _signed(bits: int) -> int:
    """The int64 with the same bits: torch multiplies those, modulo 2**64."""
    return bits - (1 << 64) if bits >> 63 else bits


# Constants of the splitmix64 generator.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1 - 2**-52] as float64 [R], one per seed and output position (int64 [R]).

    The seed is mixed before the position is added: seeds that differ by little, or by the
    position's own stride, then share no numbers.
    """
    hashed = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)
    return _shift_right(hashed, 12).double() * 2.0**-52


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # int64 shifts copy the sign bit down; the mask takes the copies away.
    return (value >> bits) & ((1 << (64 - bits)) - 1)
